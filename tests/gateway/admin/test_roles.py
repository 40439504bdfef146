"""Roles, organisations and the audit log of the admin API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.routing import Route

from gateway.admin.authorization import PERMISSIONS
from gateway.auth.admin_keys import ROLES
from gateway.billing.audit import read_audit
from gateway.billing.ledger.chain import RowError, verify
from gateway.core.errors import LedgerUnavailable
from tests.gateway.admin.test_admin import ADMIN_KEY, Desk


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(tmp_path)
    desk.audit.open()
    yield desk
    await desk.audit.close()


async def key_of(desk: Desk, role: str, **fields: Any) -> str:
    desk.key = ADMIN_KEY
    status, made = await desk.ask("POST", "/admin/admin-keys", name=f"the {role}", role=role, **fields)
    assert status == 201, made
    return str(made["key"])


def path_of(request: str) -> tuple[str, str]:
    method, path = request.split(" ")
    return method, path.replace("{tenant}", "t").replace("{project_id}", "t").replace("{name}", "t").replace(
        "{key_id}", "nobody"
    )


def test_every_route_has_a_permission(tmp_path: Path) -> None:
    routes = [each for each in Desk(tmp_path).admin._routed.routes if isinstance(each, Route)]
    served = {
        f"{method} {route.path.replace(':path', '')}"
        for route in routes
        for method in (route.methods or set()) - {"HEAD"}
    }
    elsewhere = {  # not among the routes of this test
        "GET /admin/metrics", "GET /admin/policy", "GET /admin/calls", "GET /admin/diagnosis",
        "GET /v1/organization/usage/embeddings", "GET /v1/organization/usage/moderations",
        "GET /v1/organization/usage/images", "GET /v1/organization/usage/audio_transcriptions",
        "POST /admin/diagnosis/apply", "DELETE /admin/responses/{tenant}", "GET /v1/organization/costs",
        "GET /admin/policy/document", "GET /admin/history", "GET /admin/batches", "POST /admin/batches/{id}/cancel",
        "POST /admin/explain", "POST /admin/playground/{endpoint}",
    }  # fmt: skip
    assert served | elsewhere == PERMISSIONS.keys()


async def test_each_role_may_do_what_the_table_says(desk: Desk) -> None:
    for role in ROLES:
        desk.key = await key_of(desk, role)
        for request, permission in PERMISSIONS.items():
            status, _ = await desk.ask(*path_of(request))
            assert (status == 403) == (role not in permission.roles), (role, request)
        assert (await desk.ask("GET", "/admin/me"))[1] == {
            "name": f"the {role} ({desk.key.split('-')[1]})", "role": role, "organisation": None
        }  # fmt: skip


@pytest.mark.parametrize("role", [role for role in ROLES if role != "owner"])
async def test_a_request_that_no_table_has_is_for_owners(desk: Desk, role: str) -> None:
    desk.key = await key_of(desk, role)
    assert (await desk.ask("GET", "/admin/nothing"))[0] == 403
    desk.key = ADMIN_KEY
    assert (await desk.ask("GET", "/admin/nothing"))[0] == 404


async def test_a_key_of_an_organisation_sees_and_changes_only_what_is_below_it(desk: Desk) -> None:
    for name, parent in (("t-team", "t"), ("u-team", "u")):
        assert (await desk.ask("POST", "/admin/tenants", name=name, parent=parent))[0] == 201
        assert (await desk.ask("POST", "/admin/keys", tenant=name, id=name.replace("-", "_")))[0] == 201
    desk.key = await key_of(desk, "admin", organisation="t")
    _, listed = await desk.ask("GET", "/admin/tenants")
    assert [each["name"] for each in listed["data"]] == ["t", "t-team"]
    _, keys = await desk.ask("GET", "/admin/keys")
    assert [each["id"] for each in keys["data"]] == ["t_team"]
    for method, path, body, status in (
        ("GET", "/admin/limits/t-team", {}, 200),
        ("GET", "/admin/limits/u-team", {}, 404),
        ("GET", "/admin/tenants/u", {}, 404),
        ("GET", "/admin/keys/u_team", {}, 404),
        ("DELETE", "/admin/keys/u_team", {}, 404),
        ("POST", "/admin/keys/u_team/rotate", {}, 404),
        ("POST", "/admin/keys", {"tenant": "u"}, 404),
        ("POST", "/admin/tenants", {"name": "free"}, 403),
        ("POST", "/admin/tenants", {"name": "free", "parent": "u"}, 404),
        ("PATCH", "/admin/tenants/t-team", {"parent": "u"}, 404),
        ("PATCH", "/admin/tenants/t-team", {"parent": None}, 403),
        ("PATCH", "/admin/tenants/t", {"limits": {}}, 403),  # its own limits
        ("DELETE", "/admin/tenants/u-team", {}, 404),
        ("POST", "/admin/policy/reload", {}, 403),
        ("GET", "/admin/state", {}, 403),
        ("GET", "/admin/policy", {}, 403),
        ("GET", "/admin/calls", {}, 403),
        ("GET", "/admin/audit", {}, 403),
        ("POST", "/admin/tenants", {"name": "t-user", "parent": "t-team"}, 201),
        ("PATCH", "/admin/tenants/t-user", {"limits": {"requests": "1/1m"}}, 200),
        ("DELETE", "/admin/tenants/t-user", {}, 200),
    ):
        assert (await desk.ask(method, path, **body))[0] == status, (method, path, body)


async def test_admin_keys_expire_and_are_revoked(desk: Desk) -> None:
    short = await key_of(desk, "viewer", expires="0.001s")
    viewer = await key_of(desk, "viewer", expires="30d")
    desk.key = short
    assert (await desk.ask("GET", "/admin/me"))[0] == 401
    desk.key = viewer
    assert (await desk.ask("GET", "/admin/me"))[0] == 200
    desk.key = ADMIN_KEY
    _, listed = await desk.ask("GET", "/admin/admin-keys")
    assert sorted(each["state"] for each in listed["data"]) == ["active", "expired"]
    assert viewer.rpartition("-")[2] not in str(listed) and "hash" not in str(listed)
    assert (await desk.ask("DELETE", f"/admin/admin-keys/{viewer.split('-')[1]}"))[0] == 200
    desk.key = viewer
    assert (await desk.ask("GET", "/admin/me"))[0] == 401


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"role": "viewer"}, "name"),
        ({"name": "x", "role": "root"}, "role"),
        ({"name": "x", "role": "owner", "organisation": "t"}, "organisation"),
        ({"name": "x", "role": "admin", "organisation": "nobody"}, "name"),
        ({"name": "x", "role": "admin", "expires": -1}, "expires"),
    ],
)
async def test_a_wrong_admin_key_is_refused(desk: Desk, body: dict[str, Any], param: str) -> None:
    status, reply = await desk.ask("POST", "/admin/admin-keys", **body)
    assert (status in (400, 404), reply["error"]["param"]) == (True, param)


async def test_every_act_is_recorded_before_and_after_it(desk: Desk) -> None:
    viewer = await key_of(desk, "viewer")
    await desk.ask("POST", "/admin/tenants", name="new", parent="t")
    await desk.ask("GET", "/admin/tenants")  # reads are no acts
    await desk.ask("POST", "/admin/keys", tenant="nobody")
    desk.key = viewer
    await desk.ask("DELETE", "/admin/tenants/new")
    acts = read_audit(desk.audit_folder)
    assert [(each.act.act, each.act.role, each.status) for each in acts] == [
        ("POST /admin/admin-keys", "owner", 201),
        ("POST /admin/tenants", "owner", 201),
        ("POST /admin/keys", "owner", 400),
        ("DELETE /admin/tenants/new", "viewer", 403),
    ]
    assert acts[1].act.details == {"name": "new", "parent": "t"}
    assert acts[3].act.actor.startswith("the viewer (")
    desk.key = ADMIN_KEY
    _, shown = await desk.ask("GET", "/admin/audit?limit=2")
    assert [each["act"] for each in shown["data"]] == ["DELETE /admin/tenants/new", "POST /admin/keys"]
    checked = verify(desk.audit_folder)
    assert (checked.rows, checked.broken) == (8, None)


@pytest.mark.parametrize("value", [2**70, [[[]]] * 3])
async def test_any_json_leaves_an_audit_log_that_can_be_shown(desk: Desk, value: Any) -> None:
    for _ in range(300):
        value = [value]
    status, _ = await desk.ask("POST", "/admin/tenants", name="new", limits=value, seed=2**70)
    assert status == 400
    status, shown = await desk.ask("GET", "/admin/audit")
    assert (status, [each["details"] for each in shown["data"]]) == (200, [None])


@pytest.mark.parametrize("body", [b'{"limits":' + b"[" * 5000, b'{"name":"\xff"}'])
async def test_a_body_that_cannot_be_read_is_refused(desk: Desk, body: bytes) -> None:
    transport = httpx2.ASGITransport(app=desk.admin, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://admin") as client:
        headers = {"authorization": f"Bearer {desk.key}"}
        assert (await client.post("/admin/tenants", headers=headers, content=body)).status_code == 400


async def test_an_audit_log_that_was_changed_is_found(desk: Desk) -> None:
    await desk.ask("POST", "/admin/tenants", name="new")
    (segment,) = (desk.audit_folder / "me").glob("*.jsonl")
    segment.write_bytes(segment.read_bytes().replace(b'"new"', b'"old"', 1))
    with pytest.raises(RowError, match="changed"):
        read_audit(desk.audit_folder)
    assert verify(desk.audit_folder).broken is not None
    assert (await desk.ask("GET", "/admin/audit"))[0] == 500


async def test_nothing_is_done_that_cannot_be_recorded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: Any, **__: Any) -> str:
        raise LedgerUnavailable("the disk is full")

    monkeypatch.setattr(desk.audit, "begin", full)
    assert (await desk.ask("POST", "/admin/tenants", name="new"))[0] == 503
    assert (await desk.ask("GET", "/admin/tenants/new"))[0] == 404
