"""The admin API, on the gateway's real components, through ASGI."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from pydantic import SecretStr
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.admin import Admin
from gateway.auth.admin_keys import AdminKeys
from gateway.auth.authenticator import Authenticator
from gateway.auth.keyring import Keyring
from gateway.auth.last_uses import LastUses
from gateway.auth.records import RecordFeed
from gateway.auth.sessions import Sessions
from gateway.auth.tenant_directory import TenantDirectory
from gateway.auth.tenants import TenantRegistry
from gateway.billing.audit import AuditLog
from gateway.core.api_keys import hash_key
from gateway.core.errors import Unauthenticated
from gateway.endpoints.replies import json_reply
from gateway.limits import LIMITS
from gateway.limits.limiter import Limiter
from gateway.limits.report import remaining_limits
from gateway.policy.file import PolicyHolder
from gateway.settings import resolve_secret
from gateway.storage.memory import MemoryStorage
from gateway.types import Usage
from tests.gateway.calls import a_call, chat
from tests.gateway.harness import policy_of

ADMIN_KEY = "an-admin-key-of-some-length"
NOW = 1_795_132_800.0  # 2026-11-20T00:00:00Z


class Desk:
    def __init__(self, folder: Path) -> None:
        self.file = folder / "policy.yaml"
        self.write(tenants=[{"name": "t", "limits": {"requests": "10/1m"}}, {"name": "u"}])
        self.policies = PolicyHolder(self.file)
        self.storage = MemoryStorage(owner="me")
        self.used: dict[str, int] = {}  # keys, since the last uses were written
        self.last_uses = LastUses(self.storage, lambda: self.used)
        self.feed = RecordFeed(self.storage)
        self.directory = TenantDirectory(self.feed)
        self.audit_folder = folder / "audit"
        self.audit = AuditLog(self.audit_folder, "me")
        self.now: float | None = None  # of sessions; None: the time of this machine
        self.admin = self.make(SecretStr(ADMIN_KEY))
        self.key: str | None = ADMIN_KEY

    def make(self, key: SecretStr | None) -> Admin:
        return Admin(
            policies=self.policies,
            keys=AdminKeys(self.feed, "pepper", key),
            sessions=Sessions(
                lambda: self.policies.current, self.feed, resolve_secret, admin_key=key, pepper="pepper",
                clock=lambda: self.now or time.time(),
            ),
            keyring=Keyring(self.storage, "pepper"),
            tenants=TenantRegistry(self.feed, self.directory, lambda: self.policies.current),
            audit=self.audit,
            audit_folder=self.audit_folder,
            limits_of=lambda tenant, keys, end_user: remaining_limits(
                tenant, keys, LIMITS, self.storage, now=NOW, end_user=end_user
            ),
            last_uses=self.last_uses,
            state=self.state,
            routes=[Route("/v1/organization/usage/completions", self.usage)],
        )  # fmt: skip

    def write(self, **changes: Any) -> None:
        self.file.write_text(yaml.safe_dump(policy_of(**changes)))

    async def state(self) -> dict[str, Any]:
        return {"status": "ready"}

    async def usage(self, _: Request) -> Response:
        return json_reply(200, {"object": "page"})

    async def ask(self, method: str, path: str, **body: Any) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        transport = httpx2.ASGITransport(app=self.admin, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://admin") as client:
            reply = await client.request(method, path, headers=headers, json=body or None)
        return reply.status_code, reply.json()

    async def opens(self, key: str) -> bool:
        authenticator = Authenticator(self.storage, "pepper", self.directory)
        try:
            await authenticator.authenticate({b"authorization": b"Bearer " + key.encode()}, self.policies.current)
        except Unauthenticated:
            return False
        return True


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(tmp_path)
    desk.audit.open()
    yield desk
    await desk.audit.close()


@pytest.mark.parametrize("key", [None, "", "another-key", ADMIN_KEY + "x", "wp-dev-0123456789abcdef"])
@pytest.mark.parametrize(
    "path", ["/admin/state", "/admin/keys", "/admin/nothing", "/v1/organization/usage/completions"]
)
async def test_every_route_requires_the_key(desk: Desk, path: str, key: str | None) -> None:
    desk.key = key
    status, body = await desk.ask("GET", path)
    assert status == 401
    assert set(body["error"]) == {"message", "type", "param", "code"}


async def test_without_a_configured_key_every_request_is_rejected(desk: Desk) -> None:
    desk.admin = desk.make(None)
    for desk.key in ("", "None", ADMIN_KEY):
        assert (await desk.ask("GET", "/admin/state"))[0] == 401


async def test_further_routes_require_the_same_key(desk: Desk) -> None:
    assert await desk.ask("GET", "/v1/organization/usage/completions") == (200, {"object": "page"})
    assert await desk.ask("GET", "/admin/state") == (200, {"status": "ready"})


async def test_the_life_of_a_key(desk: Desk) -> None:
    limits = {"requests": "5/1m", "budget": {"amount": 1.5, "per": "day"}}
    status, made = await desk.ask(
        "POST", "/admin/keys", tenant="t", id="ci", expires="30d", models=["m"], classes=["batch"], limits=limits
    )
    assert status == 201
    assert await desk.opens(made["key"])
    shown = {name: value for name, value in made.items() if name != "key"}
    assert shown["limits"]["requests"] == {"amount": 5, "period": 60.0}
    assert (shown["models"], shown["classes"], shown["state"]) == (["m"], ["batch"], "active")
    shown["last_used"] = None
    assert await desk.ask("GET", "/admin/keys/ci") == (200, shown)
    listed = {"object": "list", "data": [shown], "policy_keys": []}
    assert await desk.ask("GET", "/admin/keys?tenant=t") == (200, listed)
    assert await desk.ask("GET", "/admin/keys?tenant=u") == (200, {**listed, "data": []})

    _, second = await desk.ask("POST", "/admin/keys/ci/rotate", overlap="1h")
    assert await desk.opens(second["key"])
    assert await desk.opens(made["key"])
    _, third = await desk.ask("POST", "/admin/keys/ci/rotate", overlap=0)
    assert [await desk.opens(each["key"]) for each in (made, second, third)] == [False, False, True]

    status, revoked = await desk.ask("DELETE", "/admin/keys/ci")
    assert (status, revoked["state"]) == (200, "revoked")
    assert not await desk.opens(third["key"])
    status, body = await desk.ask("POST", "/admin/keys/ci/rotate")
    assert (status, body["error"]["code"]) == (409, "conflict")
    assert not any("hash" in name for name in revoked)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "tenant"),
        ({"tenant": "nobody"}, 400, "tenant"),
        ({"tenant": "t", "id": "A-b"}, 400, "id"),
        ({"tenant": "t", "models": ["gpt"]}, 400, "models"),
        ({"tenant": "t", "classes": ["fast"]}, 400, "classes"),
        ({"tenant": "t", "expires": "soon"}, 400, "expires"),
        ({"tenant": "t", "limits": {"requests": "many"}}, 400, "limits.requests"),
        ({"tenant": "t", "limit": {}}, 400, "limit"),
        ({"tenant": "t", "id": "taken"}, 409, "id"),
    ],
)
async def test_an_invalid_key_request_is_rejected_by_field(
    desk: Desk, body: dict[str, Any], status: int, param: str
) -> None:
    await desk.ask("POST", "/admin/keys", tenant="t", id="taken")
    answered, reply = await desk.ask("POST", "/admin/keys", **body)
    assert (answered, reply["error"]["param"]) == (status, param), reply


async def test_all_problems_are_reported_in_the_policy_s_words(desk: Desk) -> None:
    _, reply = await desk.ask("POST", "/admin/keys", tenat="t", limits={"requests": "many"})
    assert reply["error"]["message"] == (
        "tenant: is required: Tenant of the key.; "
        "limits.requests: a rate is a count per duration, as in 600/1m or 1M/1m; "
        "tenat: unknown key 'tenat'; known: classes, expires, id, limits, models, tenant; did you mean 'tenant'?"
    )


async def test_a_key_s_budget_needs_a_single_currency(desk: Desk) -> None:
    """The same holds for tenants in the policy."""
    budget = {"budget": {"amount": 5, "per": "day"}}
    prices = [{"input": 1, "until": "2026-12-01"}, {"input": 1, "currency": "EUR"}]
    assert (await desk.ask("POST", "/admin/keys", tenant="t", limits=budget))[0] == 201
    models = [{"name": "m", "deployments": ["a"], "cache_price": prices}]
    desk.write(tenants=[{"name": "t"}], models=models, rules=[])
    assert (await desk.ask("POST", "/admin/policy/reload"))[0] == 200
    status, reply = await desk.ask("POST", "/admin/keys", tenant="t", limits=budget)
    assert (status, reply["error"]["param"]) == (400, "limits.budget") and "EUR and USD" in reply["error"]["message"]
    assert (await desk.ask("POST", "/admin/keys", tenant="t", limits={"requests": "1/1s"}))[0] == 201


async def test_unknown_keys(desk: Desk) -> None:
    for method, path in (("GET", "/admin/keys/x"), ("DELETE", "/admin/keys/x"), ("POST", "/admin/keys/x/rotate")):
        status, body = await desk.ask(method, path)
        assert (status, body["error"]["code"]) == (404, "not_found")
    assert (await desk.ask("POST", "/admin/keys/x/rotate", overlap="31d"))[0] == 400
    assert (await desk.ask("PUT", "/admin/keys/x"))[0] == 405
    assert (await desk.ask("GET", "/admin"))[0] == 404


async def test_what_is_left_of_each_limit(desk: Desk) -> None:
    parts = [{"match": {"model": "m", "class": "batch"}, "tokens": "1k/1m"}]
    limits = {"requests": "10/1m", "concurrency": 4, "budget": {"amount": "0.5"}, "parts": parts}
    desk.write(tenants=[{"name": "t", "limits": limits}, {"name": "u"}])
    assert (await desk.ask("POST", "/admin/policy/reload"))[0] == 200
    await desk.ask("POST", "/admin/keys", tenant="t", id="ci", limits={"requests": "2/1m"})
    limiter = Limiter(desk.storage, LIMITS, clock=lambda: NOW)
    reservation = await limiter.admit(a_call(chat(max_tokens=10), desk.policies.current))
    await reservation.release_slot()
    await reservation.settle(Usage(), 200_000_000)
    status, body = await desk.ask("GET", "/admin/limits/t")
    assert (status, body["tenant"]) == (200, "t")
    assert body["limits"] == [
        {"scope": "tenant t", "limit": "requests", "amount": 10, "left": 9, "period_seconds": 60.0},
        {"scope": "tenant t", "limit": "concurrency", "amount": 4, "left": 4},
        {"scope": "tenant t", "limit": "budget", "amount": "0.5", "left": "0.3", "period": "2026-11"},
        {
            "scope": "model m and class batch of tenant t", "limit": "tokens", "amount": 1000, "left": 1000,
            "period_seconds": 60.0,
        },
        {"scope": "key ci of tenant t", "limit": "requests", "amount": 2, "left": 2, "period_seconds": 60.0},
    ]  # fmt: skip
    assert (await desk.ask("GET", "/admin/limits/u"))[1] == {"tenant": "u", "parents": [], "limits": []}
    assert (await desk.ask("GET", "/admin/limits/v"))[0] == 404


async def test_a_policy_is_reloaded_or_the_error_says_why_not(desk: Desk) -> None:
    before = desk.policies.current.hash
    desk.write(tenants=[{"name": "t"}])
    status, body = await desk.ask("POST", "/admin/policy/reload")
    assert (status, body["policy"]) == (200, desk.policies.current.hash)
    assert body["policy"] != before
    desk.file.write_text("tenants: 3")
    status, body = await desk.ask("POST", "/admin/policy/reload")
    assert status == 400
    assert "policy.yaml" in body["error"]["message"]


async def test_lists_of_keys_have_their_last_uses(desk: Desk) -> None:
    desk.write(tenants=[{"name": "t", "keys": [{"id": "file_key", "hash": hash_key("wp-file_key-" + "0" * 16, "")}]}])
    await desk.policies.reload()
    for key_id in ("used", "unused"):
        await desk.ask("POST", "/admin/keys", tenant="t", id=key_id)
    desk.used = {"used": int(NOW * 1e9), "file_key": int((NOW - 60) * 1e9)}
    await desk.last_uses.write()
    desk.used = {}
    status, listed = await desk.ask("GET", "/admin/keys")
    assert status == 200
    assert {each["id"]: each["last_used"] for each in listed["data"]} == {
        "used": "2026-11-20T00:00:00Z",
        "unused": None,
    }
    assert listed["policy_keys"] == [{"id": "file_key", "tenant": "t", "last_used": "2026-11-19T23:59:00Z"}]
