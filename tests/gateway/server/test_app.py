"""The composed application on ASGI: real transport to a scripted HTTP server, real storage and ledger."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.billing.ledger import Ledger
from gateway.billing.ledger.chain import segments
from gateway.billing.ledger.shipper import STREAM_PREFIX
from gateway.core.errors import LedgerUnavailable
from tests.gateway.billing.ledger.receipts import a_receipt
from tests.gateway.harness import (
    DONE,
    KEY,
    PATIENCE_SECONDS,
    Client,
    answer,
    chat,
    delta,
    in_time,
)
from tests.gateway.providers.scripted_server import (
    STREAM_END,
    STREAM_HEAD,
    ReceivedRequest,
    ScriptedServer,
    chunked,
    json_response,
)
from tests.gateway.server.application import Application, policy_for, running
from tests.redis_server import RedisServer, own_redis_server

__all__ = ["own_redis_server"]


AS_IT_IS_THEN = ("2.parquet", "3.parquet", "4.jsonl", "5.jsonl")


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[Application]:
    async with running(tmp_path, policy_for("http://127.0.0.1:9/v1")) as application:
        yield application


async def test_a_call_goes_all_the_way(tmp_path: Path) -> None:
    async def script(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        assert b'"served"' in request.body
        writer.write(json_response(answer()) if b'"stream"' not in request.body else STREAM_HEAD)
        if b'"stream"' in request.body:
            writer.write(chunked(delta("one")) + chunked(DONE) + STREAM_END)

    async with ScriptedServer(script) as server, running(tmp_path, policy_for(server.base_url)) as app:
        assert (await app.ask(chat())).content == answer()
        assert (await app.ask(chat(stream=True))).content == delta("one") + DONE
        metrics = (await app.get("/metrics")).content.decode()
        assert "warmpath_ledger_rows" in metrics
        assert 'warmpath_deployment_breaker{deployment="a",state="closed"} 1.0' in metrics
        assert 'warmpath_deployment_breaker{deployment="a",state="open"} 0.0' in metrics
        assert 'warmpath_batches{status="in_progress"} 0.0' in metrics
        assert 'warmpath_batches_ended_total{status="completed"} 0.0' in metrics
        assert 'warmpath_batch_lines{state="running"} 0.0' in metrics
        assert 'warmpath_cut_streams_total{result="continued"} 0.0' in metrics
        assert 'warmpath_queue_gave_way_total{class="batch"} 0.0' in metrics
        await server_closed_nothing(server)


async def server_closed_nothing(server: ScriptedServer) -> None:
    assert server.connections == 1 and not server.client_closed


async def test_a_client_that_leaves_closes_the_connection_to_the_server(tmp_path: Path) -> None:
    async def script(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(delta("one")))

    async with ScriptedServer(script) as server, running(tmp_path, policy_for(server.base_url)) as app:
        client = Client(chat(stream=True))
        serving = app.begin(client)
        await in_time(client.first_bytes.wait())
        client.leave()
        await in_time(serving)
        await server.until_the_client_closed()


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"])
async def test_a_door_takes_posts_only(app: Application, method: str) -> None:
    for endpoint in ("completions", "embeddings"):
        client = await app.ask(method=method, path=f"/v1/{endpoint}")
        assert (client.status, client.headers["allow"]) == (405, "POST")
        assert client.json["error"]["code"] == "method_not_allowed"
    for endpoint in ("messages", "messages/count_tokens"):
        client = await app.ask(method=method, path=f"/v1/{endpoint}")
        assert (client.status, client.headers["allow"]) == (405, "POST")
        assert client.json["error"]["details"]["error_code"] == "method_not_allowed"


async def test_a_wrong_method_is_told_all_methods_of_the_path(app: Application) -> None:
    client = await app.ask(method="PUT", path="/v1/chat/completions")
    assert (client.status, client.headers["allow"]) == (405, "GET, HEAD, POST")


async def test_a_request_for_a_websocket_is_told_to_send_a_post(app: Application) -> None:
    asked = [(b"sec-websocket-key", b"dGhlIHNhbXBsZSBub25jZQ=="), (b"sec-websocket-version", b"13")]
    client = await app.ask(method="GET", path="/v1/responses", headers=asked)
    assert (client.status, client.headers["upgrade"]) == (426, "HTTP/1.1")
    assert client.json["error"]["code"] == "upgrade_required"
    assert (await app.ask(method="PUT", path="/v1/responses", headers=asked)).status == 405


async def test_what_is_only_read_takes_no_posts(app: Application) -> None:
    client = await app.ask(b"{}", path="/v1/models")
    assert client.status == 405 and set(client.headers["allow"].split(", ")) == {"GET", "HEAD"}


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/chat/completions/", "/health/", "/v1/chat", "//v1/models", "/v1/../v1"]
)
async def test_what_is_not_there_is_not_there(app: Application, path: str) -> None:
    for method in ("GET", "POST"):
        client = await app.ask(b"{}", method=method, path=path, headers=[(b"host", b"evil.example")])
        assert client.status == 404 and client.json["error"]["code"] == "unknown_url"
        assert "location" not in client.headers and client.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/chat/completions"])
async def test_a_base_url_with_too_little_or_too_much_is_told(app: Application, path: str) -> None:
    client = await app.ask(path=path)
    assert client.status == 404
    assert client.json["error"]["message"] == (
        f"POST {path} does not exist, but /v1/chat/completions does: the base URL must end with /v1 once"
    )


async def test_models_are_those_that_the_caller_may_use(app: Application) -> None:
    assert [model["id"] for model in (await app.get("/v1/models")).json["data"]] == ["m", "Qwen/m"]
    assert (await app.get("/v1/models/Qwen/m")).json["id"] == "Qwen/m"
    for hidden in ("private", "nobody", ""):
        assert (await app.get(f"/v1/models/{hidden}")).status == 404
    refused = await app.get("/v1/models", key="wp-dev-wrong")
    assert refused.status == 401 and refused.headers["x-should-retry"] == "false"


async def test_who_asks_in_anthropics_words_is_answered_in_them(app: Application) -> None:
    asks = [(b"anthropic-version", b"2023-06-01")]
    listed = await app.get("/v1/models", headers=asks)
    assert [(model["type"], model["id"]) for model in listed.json["data"]] == [("model", "m"), ("model", "Qwen/m")]
    assert (listed.json["has_more"], listed.json["first_id"], listed.json["last_id"]) == (False, "m", "Qwen/m")
    assert (await app.get("/v1/models/Qwen/m", headers=asks)).json["display_name"] == "Qwen/m"
    app_key_alone = Client(method="GET", path="/v1/models", headers=[(b"x-api-key", KEY.encode()), *asks])
    app_key_alone.scope["headers"] = app_key_alone.scope["headers"][1:]
    await in_time(app.begin(app_key_alone))
    assert app_key_alone.status == 200
    for refused, status, kind in (
        (await app.get("/v1/models", headers=asks, key="wp-dev-wrong"), 401, "authentication_error"),
        (await app.get("/v1/models/none", headers=asks), 404, "not_found_error"),
        (await app.ask(b"{}", path="/v1/messages/batches"), 404, "not_found_error"),
    ):
        assert (refused.status, refused.json["type"], refused.json["error"]["type"]) == (status, "error", kind)
        assert refused.json["request_id"] == refused.headers["request-id"] == refused.headers["x-request-id"]
    assert "request-id" not in (await app.get("/v1/models")).headers


async def test_a_bug_in_the_shell_is_told_and_not_shown(app: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(accept: str) -> None:
        raise ZeroDivisionError("inner secrets")

    monkeypatch.setattr(app.gateway._parts.telemetry, "render_metrics", broken)
    client = Client(method="GET", path="/metrics")
    with pytest.raises(ZeroDivisionError):  # so that the server logs it
        await in_time(app.begin(client))
    assert client.status == 500 and client.json["error"]["code"] == "internal_error"
    assert "inner secrets" not in client.content.decode()


async def test_a_reload_reaches_the_models_and_the_servers(app: Application) -> None:
    changed = policy_for("http://127.0.0.1:9/v1")
    changed["models"][0]["aliases"] = ["new-name"]
    app.write_policy(changed)
    assert await app.policies.reload()
    assert [model["id"] for model in (await app.get("/v1/models")).json["data"]] == ["m", "new-name"]


async def test_a_policy_that_is_none_is_counted_and_changes_nothing(app: Application) -> None:
    before = (await app.get("/ready")).json["policy"]
    app.policy_file.write_text("models: []")
    assert not await app.policies.reload()
    metrics = (await app.get("/metrics")).content.decode()
    assert 'warmpath_policy_reloads_total{result="rejected"} 1.0' in metrics
    assert (await app.get("/ready")).json["policy"] == before


@asynccontextmanager
async def a_stream_at_its_end(
    directory: Path,
) -> AsyncIterator[tuple[Application, Client, asyncio.Task[None], asyncio.Event]]:
    """One chunk has come; the end comes in one piece with the end of the HTTP message, when the event is set."""
    go_on = asyncio.Event()

    async def script(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(delta("one")))
        await go_on.wait()
        writer.write(chunked(delta("two")) + chunked(DONE) + STREAM_END)

    async with ScriptedServer(script) as server, running(directory, policy_for(server.base_url)) as app:
        client = Client(chat(stream=True))
        serving = app.begin(client)
        await in_time(client.first_bytes.wait())
        yield app, client, serving, go_on


async def test_a_client_that_is_slow_at_the_end_gets_the_end(tmp_path: Path) -> None:
    async with a_stream_at_its_end(tmp_path) as (_, client, serving, go_on):
        client.takes = asyncio.Event()
        go_on.set()
        asyncio.get_running_loop().call_later(0.05, client.takes.set)
        await in_time(serving)
        assert client.whole and client.content == delta("one") + delta("two") + DONE


async def test_what_fails_at_the_very_end_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(receipt: object) -> None:
        raise LedgerUnavailable("the disk is full")

    async with a_stream_at_its_end(tmp_path) as (app, client, serving, go_on):
        monkeypatch.setattr(app.gateway.components.call_log, "append", full)
        go_on.set()
        await in_time(serving)
        assert client.whole and DONE not in client.content and b"the disk is full" in client.content


async def test_a_client_that_is_slow_on_the_way_loses_nothing(tmp_path: Path) -> None:
    frames = [delta(f"{number} " + "x" * 3000) for number in range(300)]

    async def script(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for frame in frames:
            writer.write(chunked(frame))
            await writer.drain()
        writer.write(chunked(DONE) + STREAM_END)

    class Slow(Client):
        async def send(self, message: Any) -> None:
            await asyncio.sleep(0)
            await super().send(message)

    async with ScriptedServer(script) as server, running(tmp_path, policy_for(server.base_url)) as app:
        client = Slow(chat(stream=True))
        await in_time(app.begin(client))
        assert client.whole and client.content == b"".join(frames) + DONE


@pytest.mark.slow
async def test_what_a_worker_has_left_behind_is_shipped_ages_and_is_compacted(
    tmp_path: Path, own_redis_server: RedisServer
) -> None:
    receipts = [a_receipt(event_id=f"{number:026d}") for number in range(2)] + [a_receipt() for _ in range(3)]
    async with Ledger(tmp_path / "ledger", "r.w1", segment_bytes=1000) as gone:  # a row in each
        for receipt in receipts:
            gone.append(receipt)

    async def wound_up() -> None:
        while [file.name for file in segments(gone.folder)] != [f"000000000{n}" for n in AS_IT_IS_THEN]:
            await asyncio.sleep(0.01)

    settings = {"ledger_ship": own_redis_server.url, "ledger_keep_days": 1}
    async with running(tmp_path, policy_for("http://127.0.0.1:9/v1"), **settings):
        # Each segment is compacted by a process of the lowest priority, which waits for all other tests.
        await asyncio.wait_for(wound_up(), 10 * PATIENCE_SECONDS)
    with own_redis_server.client() as client:
        (stream,) = client.scan_iter(f"{STREAM_PREFIX}r.w1.*")
        shipped = [json.loads(fields[b"row"])["event_id"] for _, fields in client.xrange(stream)]
    assert shipped == [receipt.event_id for receipt in receipts]


async def test_the_admin_api_reports_usage(tmp_path: Path) -> None:
    key = "an-admin-key-of-some-length"
    async with running(tmp_path, policy_for("http://127.0.0.1:9/v1"), admin_port=0, admin_key=key) as app:
        transport = httpx2.ASGITransport(app=app.gateway.admin)
        async with httpx2.AsyncClient(transport=transport, base_url="http://admin/v1/organization") as admin:
            asked = {"start_time": 1_795_132_800, "end_time": 1_795_132_801}
            for path in ("usage/completions", "costs"):
                refused = await admin.get(path, params=asked)
                told = await admin.get(path, params=asked, headers={"authorization": f"Bearer {key}"})
                assert (refused.status_code, told.status_code) == (401, 200)
                assert [bucket["results"] for bucket in told.json()["data"]] == [[]]


def test_a_gateway_imports_large_packages_only_when_they_are_used() -> None:
    """DuckDB, the Redis client, libzmq and protobuf with OpenTelemetry's SDK would cost each gateway its memory."""
    unused = ("duckdb", "redis", "zmq", "google.protobuf", "opentelemetry")
    program = f"import sys, gateway.server.app; print(*sorted({set(unused)} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == []
