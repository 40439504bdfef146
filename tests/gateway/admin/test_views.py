"""The dashboard's routes, in a whole gateway with a scripted server behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.admin.views import without_money
from gateway.server.worker_group import SINGLE_WORKER, WorkerGroup
from gateway.telemetry import observable
from gateway.telemetry.observable import ObservableMetric
from gateway.telemetry.recent_calls import RECENT_CALLS
from tests.gateway.harness import KEY, answer, chat, policy_of, tenant
from tests.gateway.providers.scripted_server import ReceivedRequest, ScriptedServer, json_response
from tests.gateway.server.application import Application, running

ADMIN_KEY = "an-admin-key-of-some-length"
ASKED, ANSWERED, PASSWORD = "wherefore-art-thou", "a-rose-by-any-other-name", "open-sesame"
HASH = f"hmac-sha256:{'0' * 64}"
TRACE_URL = "http://127.0.0.1:16686/trace/{trace_id}"


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[Application]:
    async def script(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_response(answer(ANSWERED)))

    async with ScriptedServer(script) as server:
        url = server.base_url.replace("http://", f"http://user:{PASSWORD}@")
        policy = policy_of(
            deployments=[{"name": "a", "base_url": f"{url}?key={PASSWORD}", "model": "served", "max_concurrency": 2}],
            models=[{"name": "m", "aliases": ["alias"], "deployments": ["a"]}],
            tenants=[
                {**tenant(), "limits": {"requests": "600/1m"}},
                {"name": "u", "limits": {"default_output_tokens": 10}},
                {"name": "by-key", "keys": [{"id": "k", "hash": HASH, "limits": {"concurrency": 1}}]},
                {"name": "paying", "limits": {"budget": {"amount": 1}}},
                {"name": "by-part", "limits": {"parts": [{"match": {"model": "m"}, "tokens": "1k/1m"}]}},
            ],
        )
        settings = {"admin_port": 0, "admin_key": ADMIN_KEY, "trace_url": TRACE_URL}
        async with running(tmp_path, policy, **settings) as application:
            yield application


async def look(app: Application, path: str, *, key: str = ADMIN_KEY, json: Any = None) -> httpx2.Response:
    transport = httpx2.ASGITransport(app=app.gateway.admin, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://admin") as client:
        method = "GET" if json is None else "POST"
        return await client.request(method, path, headers={"authorization": f"Bearer {key}"}, json=json)


async def calls(app: Application, query: str = "") -> list[dict[str, Any]]:
    reply = await look(app, f"/admin/calls{query}")
    assert reply.status_code == 200, reply.text
    return list(reply.json()["data"])


def prompt(text: str = ASKED) -> bytes:
    return chat(messages=[{"role": "user", "content": text}], user=ASKED)


async def test_the_last_calls_are_listed_newest_first(app: Application) -> None:
    served = await app.ask(prompt())
    refused = await app.ask(prompt(), key=KEY + "x")
    assert (served.status, refused.status) == (200, 401)
    second, first = await calls(app)
    assert (second["call_id"], first["call_id"]) == (refused.headers["x-request-id"], served.headers["x-request-id"])
    assert first["trace_id"] == served.headers["x-trace-id"]
    assert (first["status"], first["outcome"], first["deployment"], first["model"]) == (200, "complete", "a", "m")
    assert (first["tenant"], first["key_id"], first["class"]) == ("t", "dev", "realtime")
    assert (first["usage"]["input_uncached"], first["usage"]["output"]) == (10, 2)
    assert [attempt["outcome"] for attempt in first["attempts"]] == ["ok"]
    assert [phase["name"] for phase in first["phases"]][-1] == "settle"
    assert (second["status"], second["error_code"], second["tenant"]) == (401, "invalid_api_key", None)
    reply = (await look(app, "/admin/calls")).json()
    assert (reply["object"], reply["workers"]) == ("list", {"asked": 1, "answered": 1})


async def test_no_prompts_answers_keys_or_passwords_are_shown(app: Application) -> None:
    served = await app.ask(prompt())
    assert ANSWERED in served.content.decode()
    assert len(await calls(app)) == 1
    for path in ("/admin/calls", "/admin/policy", "/admin/metrics", "/admin/diagnosis"):
        reply = await look(app, path)
        assert reply.status_code == 200, path
        for secret in (ASKED, ANSWERED, KEY, KEY.rpartition("-")[2], ADMIN_KEY, PASSWORD, "hmac-sha256"):
            assert secret not in reply.text, (path, secret)


async def test_the_limit(app: Application) -> None:
    for _ in range(3):
        await app.ask(prompt(), key="wp-dev-wrong")
    everything = [call["call_id"] for call in await calls(app)]
    assert len(everything) == 3
    assert [call["call_id"] for call in await calls(app, "?limit=2")] == everything[:2]
    assert len(await calls(app, f"?limit={RECENT_CALLS}")) == 3


async def test_calls_of_one_class_and_troubled_calls(app: Application) -> None:
    answered = await app.ask(prompt())
    refused = await app.ask(prompt(), key="wp-dev-wrong")
    queries = ("?troubled=true", "?troubled=false", "?class=realtime", "?class=realtime&troubled=true", "?class=x")
    found = [[call["call_id"] for call in await calls(app, query)] for query in queries]
    first, second = answered.headers["x-request-id"], refused.headers["x-request-id"]
    assert found == [[second], [second, first], [first], [], []]
    reply = await look(app, "/admin/calls?troubled=1")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "troubled")


@pytest.mark.parametrize("limit", ["0", "501", "-1", "many", "", "1.5", "1" * 5000, "\u0661"])
async def test_an_invalid_limit_is_rejected_by_name(app: Application, limit: str) -> None:
    transport = httpx2.ASGITransport(app=app.gateway.admin)
    async with httpx2.AsyncClient(transport=transport, base_url="http://admin") as client:
        reply = await client.get(
            "/admin/calls", params={"limit": limit}, headers={"authorization": f"Bearer {ADMIN_KEY}"}
        )
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "limit")
    assert "from 1 to 500" in reply.json()["error"]["message"]


async def test_the_calls_that_ended_last_are_shown_by_their_start(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of two workers, and of a third one with an invalid reply."""

    def row(name: str, began: int, ended: int) -> str:
        return f'[{ended},{began},{{"call_id":"{name}"}}]'

    told = {
        0: f"[{row('long', 1, 9)},{row('early', 2, 3)}]".encode(),
        1: f"[{row('late', 7, 8)}]".encode(),
        2: b"# HELP of another version",
        3: None,
    }

    async def of_all(self: WorkerGroup, wanted: bytes) -> dict[int, bytes | None]:
        return told

    monkeypatch.setattr(WorkerGroup, "calls", of_all)
    reply = (await look(app, "/admin/calls?limit=2")).json()
    assert [call["call_id"] for call in reply["data"]] == ["late", "long"]
    assert reply["workers"] == {"asked": 4, "answered": 2}


async def test_the_policy_in_force(app: Application) -> None:
    before = (await look(app, "/admin/policy")).json()
    assert before["deployments"][0].pop("base_url").startswith("http://127.0.0.1:")
    assert before.pop("loaded_at").endswith("Z")
    assert before == {
        "hash": app.policies.current.hash,
        "path": str(app.policy_file),
        "last_error": None,
        "deployments": [{"name": "a", "provider": "openai", "model": "served", "role": None, "max_concurrency": 2}],
        "models": [{"name": "m", "aliases": ["alias"], "deployments": ["a"], "fallbacks": []}],
        "classes": ["realtime", "batch"],
        "tenants": [
            {"name": "t", "has_limits": True},
            {"name": "u", "has_limits": False},
            {"name": "by-key", "has_limits": True},
            {"name": "paying", "has_limits": True},
            {"name": "by-part", "has_limits": True},
        ],
        "trace_url": TRACE_URL,
    }
    app.policy_file.write_text("models: []")
    await app.policies.reload()
    after = (await look(app, "/admin/policy")).json()
    assert "policy.yaml:1:" in after["last_error"] and after["hash"] == before["hash"]


def test_viewers_get_metrics_without_money() -> None:
    money = [name for name in dir(observable) if isinstance(getattr(observable, name), ObservableMetric)]
    names = [getattr(observable, name).name for name in money]
    names = [name for name in names if "budget" in name or "spend" in name]
    assert len(names) == 4
    families = [*names, "warmpath_cost_total", "warmpath_cost", "warmpath_tenant_cost_total"]
    lines = [f"# HELP {name} Text.\n# TYPE {name} gauge\n{name}{{a='b'}} 1" for name in families]
    kept = ["# HELP warmpath_requests_total Text.", 'warmpath_requests_total{a="warmpath_cost_total"} 1', "# EOF"]
    assert without_money("\n".join([*lines, *kept]).encode()) == "\n".join(kept).encode()


async def test_a_viewer_reads_neither_costs_nor_budgets(app: Application) -> None:
    await app.ask(prompt())
    made = await look(app, "/admin/admin-keys", json={"name": "the viewer", "role": "viewer"})
    for path, word in (("/admin/metrics", "warmpath_cost"), ("/admin/limits/paying", '"budget"')):
        assert word in (await look(app, path)).text
        seen = await look(app, path, key=made.json()["key"])
        assert seen.status_code == 200 and word not in seen.text


async def test_the_metrics(app: Application) -> None:
    reply = await look(app, "/admin/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    public = await app.get("/metrics")
    names = {line.split()[2] for line in reply.text.splitlines() if line.startswith("# TYPE")}
    assert names == {line.split()[2] for line in public.content.decode().splitlines() if line.startswith("# TYPE")}


async def test_without_an_admin_port_no_calls_are_stored(tmp_path: Path) -> None:
    async with running(tmp_path, policy_of(), admin_key=ADMIN_KEY) as app:
        assert (await app.ask(prompt(), key="wp-dev-wrong")).status == 401
        assert await calls(app) == []


async def test_a_single_worker_reports_its_own_calls() -> None:
    worker_group = WorkerGroup(SINGLE_WORKER, metrics=lambda content_type: b"", calls=lambda wanted: b"<%b>" % wanted)
    assert await worker_group.calls(b"7") == {0: b"<7>"}
