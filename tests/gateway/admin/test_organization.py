"""Projects and keys, by OpenAI's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import openai
import pytest

from gateway.auth.keyring import Keyring
from tests.gateway.admin.test_admin import ADMIN_KEY, Desk


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(tmp_path)
    desk.audit.open()
    yield desk
    await desk.audit.close()


async def test_tenants_and_their_keys_are_read_as_projects(desk: Desk) -> None:
    assert (await desk.ask("POST", "/admin/tenants", name="u/team", parent="u"))[0] == 201
    await desk.ask("POST", "/admin/tenants", name="v", disabled=True)
    await Keyring(desk.storage, "pepper").create("u/team", key_id="one")
    await Keyring(desk.storage, "pepper").create("u/team", key_id="two")
    await Keyring(desk.storage, "pepper").revoke("two")
    desk.used["one"] = 1_800_000_000 * 10**9
    await desk.last_uses.write()
    transport = httpx2.ASGITransport(app=desk.admin, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://admin/v1") as http:
        client = openai.AsyncOpenAI(
            base_url="http://admin/v1", admin_api_key=ADMIN_KEY, http_client=http, max_retries=0
        )
        projects = client.admin.organization.projects
        assert [each.id async for each in projects.list(limit=1)] == ["t", "u", "u/team"]
        assert [each.status async for each in projects.list(include_archived=True)][-1] == "archived"
        assert (await projects.retrieve("t")).name == "t"
        (key,) = [each async for each in projects.api_keys.list("u/team")]
        assert (key.id, key.owner.type, key.redacted_value) == ("one", "service_account", "wp-one-...")
        assert key.last_used_at == 1_800_000_000
        with pytest.raises(openai.NotFoundError):
            await projects.api_keys.retrieve("two", project_id="u/team")


async def test_a_key_of_an_organisation_sees_its_projects_only(desk: Desk) -> None:
    await desk.ask("POST", "/admin/tenants", name="t-team", parent="t")
    _, made = await desk.ask("POST", "/admin/admin-keys", name="x", role="viewer", organisation="t")
    desk.key = made["key"]
    _, listed = await desk.ask("GET", "/v1/organization/projects")
    assert [each["id"] for each in listed["data"]] == ["t", "t-team"]
    assert (await desk.ask("GET", "/v1/organization/projects/u"))[0] == 404
    assert (await desk.ask("GET", "/v1/organization/projects/u/api_keys"))[0] == 404
