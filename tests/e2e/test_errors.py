"""Every failure gives one error object with four keys, and request ids. No stack trace, and no hang."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.processes import (
    DEMO,
    PATIENCE_SECONDS,
    Gateway,
    Running,
    Wire,
    chat,
    endless,
    engine,
    gateway,
    key,
    simple_policy,
    until,
)

pytestmark = pytest.mark.e2e


def error_of(reply: httpx2.Response, status: int) -> dict[str, Any]:
    """Check the error reply, and return its error object."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    assert len(bytes.fromhex(reply.headers["x-trace-id"])) == 16
    assert "Traceback" not in reply.text
    error = reply.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert reply.json().keys() == {"error"}
    assert error["message"] and error["type"]
    return dict(error)


def frames_of(received: bytes) -> list[str]:
    """The data of the events in a raw chunked reply."""
    return [line[6:].decode() for line in received.split(b"\n") if line.startswith(b"data: ")]


def last_error(received: bytes) -> dict[str, Any]:
    """Return the error in the last event of a cut stream. Checks that nothing follows it."""
    frames = frames_of(received)
    assert "[DONE]" not in frames
    assert [frame for frame in frames if '"error"' in frame] == frames[-1:]
    error = json.loads(frames[-1])["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return dict(error)


MESSAGES = chat()["messages"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"", None),
        (b"\xff\xfe", None),
        (b"[" * 100_000, None),
        ([], None),
        ("text", None),
        (None, None),
        ({}, "model"),
        ({"model": DEMO}, "messages"),
        ({"model": 1, "messages": MESSAGES}, "model"),
        ({"model": DEMO, "messages": {}}, "messages"),
        ({"model": DEMO, "messages": []}, "messages"),
        ({"model": DEMO, "messages": [1]}, "messages[0]"),
        ({"model": DEMO, "messages": [{"role": 1}]}, "messages[0].role"),
        ({"model": DEMO, "messages": [{"content": "a"}]}, "messages[0].role"),
        ({"model": DEMO, "messages": MESSAGES, "stream": "yes"}, "stream"),
        ({"model": DEMO, "messages": MESSAGES, "max_tokens": -1}, "max_tokens"),
        ({"model": DEMO, "messages": MESSAGES, "max_tokens": 10**30}, "max_tokens"),
        ({"model": DEMO, "messages": MESSAGES, "n": 0}, "n"),
        ({"model": DEMO, "messages": MESSAGES, "temperature": "hot"}, "temperature"),
        ({"model": DEMO, "messages": MESSAGES, "metadata": []}, "metadata"),
        ({"model": DEMO, "messages": MESSAGES, "stream_options": 1}, "stream_options"),
        # Errors that the engine finds have the same form.
        ({"model": DEMO, "messages": MESSAGES, "temperature": 99}, "temperature"),
        ({"model": DEMO, "messages": MESSAGES, "top_p": "a"}, "top_p"),
        ({"model": DEMO, "messages": MESSAGES, "stop": 5}, "stop"),
    ],
)
def test_invalid_chat_bodies(local_gateway: Gateway, body: Any, param: str | None) -> None:
    reply = local_gateway.post("chat/completions", body)
    error = error_of(reply, 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"model": DEMO, "prompt": 5}, "prompt"),
        ("completions", {"model": DEMO, "prompt": "a", "best_of": "x"}, "best_of"),
        ("embeddings", {"model": DEMO}, "input"),
        ("embeddings", {"model": DEMO, "input": {}}, "input"),
        ("embeddings", {"model": DEMO, "input": []}, "input"),
        ("embeddings", {"model": DEMO, "input": "a", "encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_invalid_bodies_of_other_endpoints(local_gateway: Gateway, path: str, body: Any, param: str) -> None:
    assert error_of(local_gateway.post(path, body), 400)["param"] == param


def test_a_model_that_does_not_exist(local_gateway: Gateway) -> None:
    error = error_of(local_gateway.post("chat/completions", chat() | {"model": "gpt-99"}), 404)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "model", "model_not_found")
    assert "gpt-99" in error["message"]


def test_a_prompt_longer_than_the_context_is_rejected_by_the_engine(local_gateway: Gateway) -> None:
    for body in (chat("long " * 5000), chat("long " * 5000, stream=True)):
        reply = local_gateway.post("chat/completions", body)
        error = error_of(reply, 400)
        assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
        assert "2048" in error["message"]


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_of_40_megabytes(local_gateway: Gateway, announced: bool) -> None:
    content = json.dumps(chat("x" * 40 * 2**20)).encode()
    parts = (content[start : start + 2**16] for start in range(0, len(content), 2**16))
    reply = httpx2.post(
        f"{local_gateway.url}/v1/chat/completions",
        content=content if announced else parts,
        headers={"authorization": f"Bearer {key('dev')}"},
        timeout=PATIENCE_SECONDS,
    )
    assert error_of(reply, 413)["code"] == "request_too_large"
    assert local_gateway.post("chat/completions", chat(max_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wp-dev-wrong"},
        {"authorization": "Bearer"},
        {"authorization": "Basic wp-dev-wrong"},
        {"authorization": f"Bearer {key('unknown')}"},
        {"authorization": "Bearer " + "x" * 5000},
        {"authorization": "Bearer \xe4\xf6"},
        {"x-api-key": "sk-something"},
    ],
)
def test_invalid_keys(local_gateway: Gateway, headers: dict[str, str]) -> None:
    for method, path in (("POST", "chat/completions"), ("GET", "models"), ("GET", f"models/{DEMO}")):
        raw = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
        url = f"{local_gateway.url}/v1/{path}"
        error = error_of(httpx2.request(method, url, json=chat(), headers=raw, timeout=PATIENCE_SECONDS), 401)
        assert error["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_url"),
        ("POST", "/v1/nowhere", 404, "unknown_url"),
        ("POST", "/chat/completions", 404, "unknown_url"),
        ("GET", "/v1/models/../../etc/passwd", 404, "unknown_url"),
        ("PUT", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/embeddings", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/health", 405, "method_not_allowed"),
    ],
)
def test_unknown_urls_and_methods(local_gateway: Gateway, method: str, path: str, status: int, code: str) -> None:
    headers = {"authorization": f"Bearer {key('dev')}"}
    reply = httpx2.request(method, f"{local_gateway.url}{path}", headers=headers, timeout=PATIENCE_SECONDS)
    error = error_of(reply, status)
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    if status == 405:
        assert method not in reply.headers["allow"]


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_is_down(local_gateway: Gateway, stream: bool) -> None:
    reply = local_gateway.post("chat/completions", chat(stream=stream) | {"model": "dead"})
    error = error_of(reply, 502)
    assert error["code"] == "upstream_error"
    assert [attempt["deployment"] for attempt in error["attempts"]] == ["down", "down-too"] * 2  # each twice
    assert {attempt["outcome"] for attempt in error["attempts"]} == {"connect_error"}
    assert reply.headers["x-should-retry"] == "true"
    receipt = local_gateway.receipt(reply.headers["x-request-id"])
    assert (receipt["outcome"], receipt["output"], float(receipt["cost"])) == ("refused", 0, 0)


@pytest.mark.slow
def test_an_engine_that_hangs_before_the_first_chunk(local_gateway: Gateway, local_engine: Running) -> None:
    with local_engine.frozen():
        reply = local_gateway.post("chat/completions", endless(), **{"x-class": "hasty"})
    error = error_of(reply, 504)
    assert error["code"] == "upstream_timeout"
    assert [(attempt["deployment"], attempt["outcome"]) for attempt in error["attempts"]] == [("local", "timeout")]
    assert local_gateway.receipt(reply.headers["x-request-id"])["outcome"] == "timeout"
    until(lambda: local_engine.metric("vllm:num_requests_running") == 0)


@pytest.mark.slow
def test_an_engine_that_stalls_in_the_middle_of_a_stream(local_gateway: Gateway, local_engine: Running) -> None:
    with Wire(local_gateway, "chat/completions", endless(), **{"x-class": "impatient"}) as client:
        client.read_until(b"data: ", times=5)
        with local_engine.frozen():
            received = client.read_to_end()
    error = last_error(received)
    assert error["code"] == "upstream_cut"
    receipt = local_gateway.receipt(client.header("x-request-id"))
    assert receipt["outcome"] == "timeout"
    assert [attempt["outcome"] for attempt in receipt["attempts"]] == ["timeout"]
    assert receipt["output"] >= 1  # estimated from the bytes of its text, which is short where the words are
    until(lambda: local_engine.metric("vllm:num_requests_running") == 0)


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[tuple[Running, Gateway]]:
    with engine(tmp_path / "engine") as server, gateway(tmp_path / "gateway", simple_policy(server.url)) as front:
        yield server, front


@pytest.mark.slow
def test_an_engine_that_is_killed_during_its_streams(doomed: tuple[Running, Gateway]) -> None:
    server, front = doomed
    clients = [Wire(front, "chat/completions", endless()) for _ in range(3)]
    whole = Wire(front, "chat/completions", endless() | {"stream": False})
    for client in clients:
        client.read_until(b"data: ", times=4)
    until(lambda: server.metric("vllm:num_requests_running") == 4)
    server.kill()
    for client in clients:
        assert last_error(client.read_to_end())["code"] == "upstream_cut"
        receipt = front.receipt(client.header("x-request-id"))
        assert receipt["outcome"] == "upstream_cut"
        assert receipt["output"] >= 1
        assert not receipt["exact"], "no engine is left to report the usage"
        client.leave()
    status, reply = whole.read_reply()
    assert (status, reply["error"]["code"]) == (502, "upstream_error")
    whole.leave()
    assert error_of(front.post("chat/completions", chat()), 502)["attempts"][0]["outcome"] == "connect_error"
    assert httpx2.get(f"{front.url}/health").status_code == 200
    assert httpx2.get(f"{front.url}/ready").json()["deployments"] == {"local": False}
