"""The admin API of two gateways on one Redis: a key created, rotated or revoked through one changes on both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.processes import (
    DEMO,
    PATIENCE_SECONDS,
    Gateway,
    Running,
    gateway,
    simple_policy,
    tenant,
    until,
    warmpath,
)
from tests.ports import free_port
from tests.redis_server import RedisServer

pytestmark = pytest.mark.e2e

ADMIN_KEY = "an-admin-key-of-some-length"
BODY = {"model": DEMO, "prompt": [100, 101], "max_tokens": 1}


@dataclass(frozen=True)
class Front:
    gateway: Gateway
    admin_url: str

    def admin(self, method: str, path: str, *, key: str = ADMIN_KEY, **body: Any) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {key}"}
        reply = httpx2.request(
            method, f"{self.admin_url}{path}", json=body or None, headers=headers, timeout=PATIENCE_SECONDS
        )
        return reply.status_code, reply.json()

    def status_for(self, key: str, **changes: Any) -> int:
        headers = {"authorization": f"Bearer {key}"}
        url = f"{self.gateway.url}/v1/completions"
        return httpx2.post(url, json=BODY | changes, headers=headers, timeout=PATIENCE_SECONDS).status_code


@pytest.fixture(scope="module")
def fronts(
    tmp_path_factory: pytest.TempPathFactory, local_engine: Running, redis_server: RedisServer
) -> Iterator[list[Front]]:
    folder = tmp_path_factory.mktemp("fronts")
    policy = simple_policy(local_engine.url, tenants=[tenant("dev", limits={"requests": "100/1h"})])
    common: dict[str, Any] = {"storage": redis_server.url, "admin_key": ADMIN_KEY, "admin_port": "0"}
    with (
        gateway(folder / "a", policy, replica="a", **common) as a,
        gateway(folder / "b", policy, replica="b", **common) as b,
    ):
        yield [Front(one, one.admin_url) for one in (a, b)]


@pytest.mark.slow
def test_changes_of_a_key_apply_to_both_gateways(fronts: list[Front]) -> None:
    here, there = fronts
    limits = {"requests": "50/1h"}
    status, made = here.admin("POST", "/admin/keys", tenant="dev", id="life", classes=["realtime"], limits=limits)
    assert status == 201
    assert there.status_for(made["key"]) == 200
    assert there.status_for(made["key"], service_tier="flex") == 200  # no rule assigns another class
    status, rotated = there.admin("POST", "/admin/keys/life/rotate", overlap="1h")
    assert status == 200
    until(lambda: here.status_for(rotated["key"]) == 200)
    assert here.status_for(made["key"]) == 200  # the old secret is valid for an hour

    def left() -> int:
        status, limits = here.admin("GET", "/admin/limits/dev")
        assert status == 200
        return int(next(each["left"] for each in limits["limits"] if each["scope"] == "key life of tenant dev"))

    until(lambda: left() < 50)  # gateways report what they used once a second
    status, revoked = here.admin("DELETE", "/admin/keys/life")
    assert revoked["state"] == "revoked"
    for front in fronts:
        until(lambda front=front: front.status_for(rotated["key"]) == 401)
        assert front.status_for(made["key"]) == 401


@pytest.mark.slow
def test_a_stored_tenant_calls_at_both_gateways_within_its_own_and_its_parents_limits(fronts: list[Front]) -> None:
    here, there = fronts
    status, made = here.admin("POST", "/admin/tenants", name="team", parent="dev", limits={"requests": "30/1h"})
    assert (status, made["parent"]) == (201, "dev")
    users = {"requests": "2/1h"}
    assert there.admin("POST", "/admin/tenants", name="app", parent="team", limits={"end_users": users})[0] == 201
    _, created = there.admin("POST", "/admin/keys", tenant="app", id="app")
    for front in fronts:
        until(lambda front=front: front.status_for(created["key"], user=front.admin_url) == 200)
    assert {front.status_for(created["key"], user="ada") for front in fronts} == {200}
    for front in fronts:  # the end user's two requests are used up, those of the tenants are not
        assert front.status_for(created["key"], user="ada") == 429
        assert front.status_for(created["key"], user="bob") == 200 or front is there
    _, shown = here.admin("GET", "/admin/limits/app?end_user=ada")
    assert shown["limits"][-1]["left"] == 0
    assert shown["parents"] == ["dev", "team"]

    status, viewer = here.admin("POST", "/admin/admin-keys", name="a viewer", role="viewer", organisation="team")
    assert status == 201
    until(lambda: there.admin("GET", "/admin/me", key=viewer["key"])[0] == 200)
    _, listed = there.admin("GET", "/admin/tenants", key=viewer["key"])
    assert [each["name"] for each in listed["data"]] == ["app", "team"]
    assert there.admin("DELETE", "/admin/tenants/app", key=viewer["key"])[0] == 403
    assert there.admin("DELETE", "/admin/tenants/app")[0] == 200
    for front in fronts:
        until(lambda front=front: front.status_for(created["key"], user="eve") == 401)
    _, acts = there.admin("GET", "/admin/audit")
    assert [(each["act"], each["role"], each["status"]) for each in acts["data"][:2]] == [
        ("DELETE /admin/tenants/app", "owner", 200), ("DELETE /admin/tenants/app", "viewer", 403)
    ]  # fmt: skip


def test_the_two_listeners_serve_different_routes(fronts: list[Front]) -> None:
    front = fronts[0]
    assert front.admin("GET", "/admin/state", key="wp-dev-0123456789abcdef")[0] == 401
    assert front.admin("GET", "/v1/models")[0] == 404
    status, state = front.admin("GET", "/admin/state")
    assert (status, state["status"]) == (200, "ready")
    from_main_listener = httpx2.get(
        f"{front.gateway.url}/admin/state", headers={"authorization": f"Bearer {ADMIN_KEY}"}
    )
    assert from_main_listener.status_code == 404


def test_a_policy_is_reloaded_at_once(fronts: list[Front]) -> None:
    status, body = fronts[0].admin("POST", "/admin/policy/reload")
    assert (status, set(body)) == (200, {"policy"})


def test_an_admin_port_needs_a_key(tmp_path: Path) -> None:
    result = warmpath("serve", "--port", "0", cwd=tmp_path, admin_port=str(free_port()))
    assert result.returncode == 2
    assert "WARMPATH_ADMIN_KEY" in result.stderr
