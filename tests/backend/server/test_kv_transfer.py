"""Two servers: one prefills, the other one loads its blocks and decodes, or computes what does not come."""

from __future__ import annotations

import json
import re
import select
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import SIGCONT, SIGSTOP
from threading import Event, Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.otlp_collector import attributes, collecting

if TYPE_CHECKING:
    from tests.backend.server.conftest import RunningServer, StartServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLOCK_TOKENS = 16
PROMPT = [(7 * i * i + i) % 500 + 4 for i in range(3000)]
FULL_TOKENS = 2992  # of its full blocks
CHAT = {"messages": [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 40}]}
ANSWER: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
FOR_ANOTHER = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None, "remote_block_ids": None}


@pytest.fixture(scope="module")
def prefill(start_server: StartServer) -> Iterator[RunningServer]:
    with start_server("--kv-transfer") as server:
        yield server


@pytest.fixture(scope="module")
def decode(start_server: StartServer) -> Iterator[RunningServer]:
    with start_server("--kv-transfer-peers", "127.0.0.1", "--kv-transfer-seconds", "30") as server:
        yield server


def post(server: RunningServer, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    response = httpx2.post(f"{server.url}{path}", json=body, timeout=60)
    assert response.status_code == status, response.text
    reply: dict[str, Any] = response.json()
    return reply


def complete(server: RunningServer, **fields: Any) -> tuple[str, int]:
    """The text of an answer to the prompt, and how many of its tokens were cached."""
    reply = post(server, "/v1/completions", {"prompt": PROMPT, **ANSWER, **fields})
    return reply["choices"][0]["text"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def source(server: RunningServer) -> dict[str, Any]:
    return source_at(urlsplit(server.url).port or 0)


def source_at(port: int) -> dict[str, Any]:
    return {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": port}


@pytest.mark.parametrize(
    ("path", "request_body"),
    [("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", CHAT)],
    ids=["completion", "chat"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_computed_by_one_engine_and_answered_by_another(
    prefill: RunningServer, decode: RunningServer, path: str, request_body: dict[str, Any], *, stream: bool
) -> None:
    """As vLLM's proxies do it."""
    body = {**request_body, **ANSWER, "cache_salt": f"{path} {stream}"}
    first = post(prefill, path, body | {"max_tokens": 1, "kv_transfer_params": FOR_ANOTHER})
    params = first["kv_transfer_params"]
    address = urlsplit(prefill.url)
    assert (params["remote_host"], params["remote_port"]) == (address.hostname, address.port)
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    external = {"source": "external_kv_transfer"}
    before = decode.metric("vllm:prompt_tokens_by_source_total", **external)
    request = body | {"kv_transfer_params": params}
    if stream:
        request |= {"stream": True, "stream_options": {"include_usage": True}}
        lines = httpx2.post(f"{decode.url}{path}", json=request, timeout=60).text.splitlines()
        assert lines[-2] == "data: [DONE]"
        usage = httpx2.Response(200, content=lines[-4].removeprefix("data: ")).json()["usage"]
    else:
        reply = post(decode, path, request)
        usage = reply["usage"]
        assert "kv_transfer_params" not in reply
        assert reply["choices"] == post(prefill, path, body)["choices"]
    prompt_tokens = first["usage"]["prompt_tokens"]
    cached = (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert usage["prompt_tokens"] == prompt_tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] == cached
    assert decode.metric("vllm:prompt_tokens_by_source_total", **external) - before == cached


def test_the_second_request_finds_the_blocks_in_the_cache(prefill: RunningServer, decode: RunningServer) -> None:
    expected, _ = complete(prefill, cache_salt="twice")
    sent = prefill.metric("warmpath:kv_blocks_sent_total")
    params = {"cache_salt": "twice", "kv_transfer_params": source(prefill)}
    assert complete(decode, **params) == complete(decode, **params) == (expected, FULL_TOKENS)
    assert prefill.metric("warmpath:kv_blocks_sent_total") - sent == FULL_TOKENS // BLOCK_TOKENS
    assert complete(decode, cache_salt="twice") == (expected, FULL_TOKENS)


def test_blocks_that_move_leave_the_other_engine(prefill: RunningServer, decode: RunningServer) -> None:
    expected, _ = complete(prefill, cache_salt="moves")
    kept_tokens = 20 * BLOCK_TOKENS - 3  # in the 20th block
    params = source(prefill) | {"remote_tokens_kept": kept_tokens}
    assert complete(decode, cache_salt="moves", kv_transfer_params=params) == (expected, FULL_TOKENS)
    again = {"prompt": PROMPT[: 40 * BLOCK_TOKENS + 1], **ANSWER, "max_tokens": 1, "cache_salt": "moves"}
    usage = post(prefill, "/v1/completions", again)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 20 * BLOCK_TOKENS
    assert complete(decode, cache_salt="moves") == (expected, FULL_TOKENS)
    assert prefill.metric("warmpath:integrity") == 1


def test_blocks_of_several_prompts_are_copied(prefill: RunningServer, decode: RunningServer) -> None:
    """What stays is a number of tokens of one prompt."""
    two = {"prompt": [PROMPT[:200], PROMPT[200:400]], **ANSWER, "max_tokens": 1, "cache_salt": "two"}
    post(prefill, "/v1/completions", two)
    params = source(prefill) | {"remote_tokens_kept": 0}
    for server, fields in ((decode, {"kv_transfer_params": params}), (prefill, {})):
        usage = post(server, "/v1/completions", two | fields)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * 192


def test_a_tenant_gets_no_block_of_another_salt(prefill: RunningServer, decode: RunningServer) -> None:
    expected, _ = complete(prefill, cache_salt="tenant a")
    assert complete(decode, cache_salt="tenant b", kv_transfer_params=source(prefill)) == (expected, 0)
    assert complete(decode, cache_salt="tenant a", kv_transfer_params=source(prefill)) == (expected, FULL_TOKENS)


def test_blocks_that_were_evicted_are_computed(prefill: RunningServer, decode: RunningServer) -> None:
    expected, _ = complete(prefill, cache_salt="evicted")
    for seed in range(6):  # more blocks than the cache has
        complete(prefill, cache_salt=f"other {seed}")
    assert complete(decode, cache_salt="evicted", kv_transfer_params=source(prefill)) == (expected, 0)


@pytest.mark.parametrize("options", [("--dtype", "bfloat16"), ("--kv-cache-dtype", "int8")])
def test_blocks_of_another_form_are_not_used(start_server: StartServer, options: tuple[str, ...]) -> None:
    with (
        start_server("--kv-transfer", *options) as other,
        start_server("--kv-transfer-peers", "127.0.0.1") as server,
    ):
        expected, _ = complete(server, cache_salt="elsewhere")
        complete(other)
        assert complete(server, kv_transfer_params=source(other)) == (expected, 0)
        assert _outcomes(server) == {"other_layout": 1}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8_e4m3"])
def test_answers_are_equal_in_every_form_of_the_cache(start_server: StartServer, kv_cache_dtype: str) -> None:
    options = ("--dtype", "bfloat16", "--kv-cache-dtype", kv_cache_dtype)
    with (
        start_server("--kv-transfer", *options) as first,
        start_server("--kv-transfer-peers", "127.0.0.1", *options) as second,
    ):
        complete(first)
        expected = complete(first)
        assert complete(second, kv_transfer_params=source(first)) == expected == (expected[0], FULL_TOKENS)


def _outcomes(server: RunningServer) -> dict[str, float]:
    """How many loads ended in which way."""
    text = httpx2.get(f"{server.url}/metrics").text
    return {outcome: float(count) for outcome, count in re.findall(r'kv_loads_total{.*outcome="(\w+)"} (\S+)', text)}


def _loads(server: RunningServer, outcome: str) -> float:
    return _outcomes(server).get(outcome, 0.0)


@contextmanager
def relay(server: RunningServer, num_bytes: int, fault: Callable[[], None]) -> Iterator[int]:
    """A relay to the server that calls `fault` after so many bytes of a response. Its port.

    The rest of the response is lost, even if the server's kernel has it already, as if its machine had the fault. The
    connection is reset if the process has ended, and else stays open.
    """
    address = urlsplit(server.url)

    def serve() -> None:
        client, _ = listener.accept()
        with client, socket.create_connection((address.hostname, address.port)) as upstream:
            while not _is_readable(upstream):
                if _is_readable(client):
                    upstream.sendall(client.recv(65536))
            left = num_bytes
            while left:
                data = upstream.recv(min(left, 4096))
                assert data, "the response is shorter"
                client.sendall(data)
                left -= len(data)
            fault()
            if server.process.poll() is None:
                client.recv(1)  # until the loader gives up
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(60)
        assert not thread.is_alive()


def _is_readable(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0.01)[0])


def test_a_peer_that_is_killed_in_the_middle_of_a_transfer_costs_no_answer(
    start_server: StartServer, decode: RunningServer
) -> None:
    with start_server("--kv-transfer") as first:
        expected, _ = complete(first, cache_salt="killed")
        before = _loads(decode, "unreachable")

        def kill() -> None:
            first.process.kill()
            first.process.wait()

        with relay(first, 300_000, kill) as port:
            text, cached = complete(decode, cache_salt="killed", kv_transfer_params=source_at(port))
        assert text == expected
        assert cached < FULL_TOKENS
        assert _loads(decode, "unreachable") - before == 1
    assert decode.metric("warmpath:engine_up") == 1
    assert decode.metric("warmpath:integrity") == 1


def test_a_frozen_peer_costs_the_time_limit(start_server: StartServer) -> None:
    with (
        start_server("--kv-transfer") as first,
        start_server("--kv-transfer-peers", "127.0.0.1", "--kv-transfer-seconds", "0.2") as second,
    ):
        expected, _ = complete(first)
        first.process.send_signal(SIGSTOP)
        try:
            assert complete(second, kv_transfer_params=source(first)) == (expected, 0)
            assert _loads(second, "timeout") == 1
        finally:
            first.process.send_signal(SIGCONT)


def test_a_peer_that_freezes_in_the_middle_of_a_transfer_costs_the_time_limit(start_server: StartServer) -> None:
    with (
        start_server("--kv-transfer") as first,
        start_server("--kv-transfer-peers", "127.0.0.1", "--kv-transfer-seconds", "0.5") as second,
    ):
        expected, _ = complete(first)
        try:
            with relay(first, 300_000, lambda: first.process.send_signal(SIGSTOP)) as port:
                text, cached = complete(second, kv_transfer_params=source_at(port))
        finally:
            first.process.send_signal(SIGCONT)
        assert (text, _loads(second, "timeout")) == (expected, 1)
        assert cached < FULL_TOKENS


def test_a_client_that_leaves_during_a_load_has_used_nothing(prefill: RunningServer, decode: RunningServer) -> None:
    complete(prefill, cache_salt="left")
    asked, left = Event(), Event()

    def wait() -> None:
        asked.set()
        assert left.wait(60)

    with relay(prefill, 1000, wait) as port:
        body = {"prompt": PROMPT, **ANSWER, "cache_salt": "left", "kv_transfer_params": source_at(port)}
        content, address = json.dumps(body).encode(), urlsplit(decode.url)
        with socket.create_connection((address.hostname, address.port)) as client:
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: left\r\n"
            client.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            assert asked.wait(60)
        left.set()
    usage = httpx2.get(f"{decode.url}/requests/left").raise_for_status().json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (0, 0)


def test_a_peer_that_is_not_named_is_not_asked(prefill: RunningServer, start_server: StartServer) -> None:
    expected, _ = complete(prefill, cache_salt="unnamed")
    with start_server("--kv-transfer-peers", "127.0.0.1:1", "10.0.0.0/8", "engine-b") as server:
        assert complete(server, cache_salt="unnamed", kv_transfer_params=source(prefill)) == (expected, 0)
        assert _loads(server, "not_allowed") == 1


def test_what_a_server_does_not_do_is_rejected_by_name(
    prefill: RunningServer, decode: RunningServer, server: RunningServer
) -> None:
    def message(asked: RunningServer, **fields: Any) -> str:
        error = post(asked, "/v1/completions", {"prompt": [5, 6], **ANSWER, **fields}, status=400)["error"]
        assert error["param"].startswith("kv_transfer_params")
        text: str = error["message"]
        return text

    for params in (None, {}, {"do_remote_decode": False, "remote_engine_id": "x"}):
        post(server, "/v1/completions", {"prompt": [5, 6], **ANSWER, "kv_transfer_params": params})
    assert "requires an engine with --kv-transfer." in message(server, kv_transfer_params=FOR_ANOTHER)
    assert "requires an engine with --kv-transfer." in message(decode, kv_transfer_params=FOR_ANOTHER)
    assert "--kv-transfer-peers" in message(server, kv_transfer_params=source(prefill))
    assert "--kv-transfer-peers" in message(prefill, kv_transfer_params=source(prefill))
    assert "`stream`" in message(prefill, kv_transfer_params=FOR_ANOTHER, stream=True)
    assert "exclude each other" in message(prefill, kv_transfer_params=FOR_ANOTHER | {"do_remote_prefill": True})
    assert "`remote_host` and `remote_port`" in message(decode, kv_transfer_params={"do_remote_prefill": True})
    message(decode, kv_transfer_params=source_at(70_000))
    message(decode, kv_transfer_params=source_at(80) | {"remote_tokens_kept": -1})


def test_blocks_are_served_only_by_an_engine_that_was_told_to(prefill: RunningServer, decode: RunningServer) -> None:
    assert httpx2.post(f"{decode.url}/kv_blocks", content=bytes(32)).status_code == 404
    assert httpx2.get(f"{prefill.url}/kv_blocks").status_code == 405
    longest = httpx2.get(f"{prefill.url}/v1/models").json()["data"][0]["max_model_len"] // BLOCK_TOKENS
    for body in (b"", bytes(33), bytes(32 * (longest + 1))):
        assert httpx2.post(f"{prefill.url}/kv_blocks", content=body).status_code == 400
    for kept in ("-1", "1.5", "x", "9" * 5000):
        reply = httpx2.post(f"{prefill.url}/kv_blocks", content=bytes(32), headers={"x-kv-blocks-kept": kept})
        assert (reply.status_code, "x-kv-blocks-kept" in reply.text) == (400, True)
    assert httpx2.post(f"{prefill.url}/kv_blocks", content=bytes(32 * longest)).status_code == 200
    unknown = httpx2.post(f"{prefill.url}/kv_blocks", content=bytes(64))
    assert unknown.headers["content-type"] == "application/octet-stream"
    assert unknown.content.startswith(b"WPKV") and unknown.content.endswith(bytes(4))
    assert len(unknown.content) < 1000


def test_a_load_has_a_span_of_its_own(prefill: RunningServer, start_server: StartServer) -> None:
    complete(prefill, cache_salt="traced")
    with collecting() as collector:
        with start_server("--kv-transfer-peers", "127.0.0.1", "--otlp-endpoint", collector.url) as server:
            complete(server, cache_salt="traced", kv_transfer_params=source(prefill))
        spans = {span.name: span for span in collector.spans}
    assert [name for name in spans if name.startswith("engine.")][:2] == ["engine.tokenize", "engine.kv_load"]
    load = attributes(spans["engine.kv_load"])
    assert load["warmpath.kv_load.source"] == prefill.url.removeprefix("http://")
    assert load["warmpath.kv_load.blocks"] == FULL_TOKENS // BLOCK_TOKENS
    assert load["warmpath.kv_load.bytes"] == FULL_TOKENS // BLOCK_TOKENS * 2 * 2 * BLOCK_TOKENS * 2 * 16 * 4
    assert attributes(spans["engine.prefill"])["warmpath.prefill.cached_tokens"] == FULL_TOKENS
    assert spans["engine.kv_load"].end_time_unix_nano == spans["engine.queue"].start_time_unix_nano


def test_a_host_header_with_an_impossible_port_names_no_host(prefill: RunningServer) -> None:
    body = {"prompt": PROMPT[:40], **ANSWER, "kv_transfer_params": FOR_ANOTHER}
    reply = httpx2.post(f"{prefill.url}/v1/completions", json=body, headers={"host": "x:99999"})
    assert reply.status_code == 200, reply.text
    assert reply.json()["kv_transfer_params"]["remote_host"] is None
