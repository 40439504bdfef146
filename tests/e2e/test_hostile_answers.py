"""What a deployment may put into its answers and errors, and what of it leaves the gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.e2e.faults.upstreams import Request, listening
from tests.e2e.processes import Gateway, chat, deployment, gateway, simple_policy, text_of, until
from tests.gateway.providers.scripted_server import STREAM_END, STREAM_HEAD, chunked, json_response
from tests.otlp_collector import Collector

pytestmark = pytest.mark.e2e

SECRET = "sk-upstream-0123456789-abcdefghijklmnop"
ADMIN_KEY = "a-key-for-the-admin-api"


async def good(request: Request) -> None:
    await request.whole()


def event(text: str | None, **choice: Any) -> dict[str, Any]:
    choices = [{"index": 0, "delta": {} if text is None else {"content": text}, **choice}]
    return {"id": "x", "object": "chat.completion.chunk", "model": "m", "choices": choices}


async def odd_lines(request: Request) -> None:
    """A right stream in a form that the standard allows: CRLF, several data lines, other fields, spaces at the end."""
    frames = [
        ": hello",
        "id: 1\ndata: " + json.dumps(event("one ")),
        "event: x\ndata:" + json.dumps(event("two"), indent=1).replace("\n", "\ndata: "),
        "data: " + json.dumps(event(None, finish_reason="stop")),
        "data:  [DONE] \nid: 9",
    ]
    text = "".join(frame + "\n\n" for frame in frames).replace("\n", "\r\n")
    await request.write(STREAM_HEAD)
    for start in range(0, len(text), 7):
        await request.write(chunked(text[start : start + 7].encode()))
    await request.write(STREAM_END)


async def not_utf8(request: Request) -> None:
    bad = json.dumps(event("?")).encode().replace(b"?", b"\xff\xfe")
    if request.streams:
        await request.write(STREAM_HEAD + chunked(b"data: " + bad + b"\n\n"))
    else:
        await request.write(json_response(bad))


async def quoting(request: Request) -> None:
    """Errors that quote the Authorization header, as proxies' do."""
    quoted = f"bad request: authorization: Bearer {SECRET}"
    error = json.dumps({"error": {"message": quoted, "type": "x", "code": None, "param": None}}).encode()
    model = request.body["model"]
    if model == "status":
        await request.write(json_response(error, "400 Bad Request"))
    elif model == "server":
        await request.write(json_response(error, "500 Oops", f"x-echo: {SECRET}"))
    elif model == "type":
        await request.write(json_response(b"{}").replace(b"application/json", SECRET.encode()))
    elif model == "late":
        await request.head()
        await request.tokens(0, 2)
        await request.write(chunked(b"data: " + error + b"\n\n"))
    else:
        await request.write(json_response(error))


QUOTING = ("status", "server", "type", "late", "in a 200")
PATHS = ("chat/completions", "messages", "responses")
# Each request has a deployment of its own, whose circuit breaker no other request has opened.
REQUESTS = [(path, stream) for path in PATHS for stream in (False, True)]


def name_of(case: str, path: str, stream: bool) -> str:
    return f"{case} {path}{' stream' if stream else ''}"


def body_of(model: str, path: str, stream: bool) -> dict[str, Any]:
    prompt = {"input": "hi"} if path == "responses" else {**chat(), "max_tokens": 9}
    return {**prompt, "model": model, "stream": stream}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("hostile")
    behaviours = {"good": good, "odd-lines": odd_lines, "not-utf8": not_utf8, "quoting": quoting}
    with listening(behaviours) as upstreams:
        urls = {name: f"http://127.0.0.1:{port}" for name, port in upstreams.ports.items()}
        keyed = {"provider": "openai", "api_key": {"env": "WARMPATH_TEST_SECRET"}}
        deployments = [deployment(name, urls[name], provider="openai") for name in ("good", "odd-lines")]
        models = [{"name": name, "deployments": [name]} for name in ("good", "odd-lines")]
        for request in REQUESTS:
            bad = name_of("not-utf8", *request)
            deployments.append(deployment(bad, urls["not-utf8"], provider="openai"))
            models.append({"name": bad, "deployments": [bad], "fallbacks": ["good"]})
            for case in QUOTING:
                name = name_of(case, *request)
                deployments.append(deployment(name, urls["quoting"], **keyed, model=case))
                models.append({"name": name, "deployments": [name]})
        policy = simple_policy("", deployments=deployments, models=models)
        with gateway(
            folder, policy, test_secret=SECRET, admin_port="0", admin_key=ADMIN_KEY, otlp_endpoint=collector.url
        ) as started:
            yield started


def test_a_stream_in_any_form_of_the_standard_is_read_and_passed_on_in_the_usual_one(front: Gateway) -> None:
    reply = front.post("chat/completions", {**chat(stream=True), "model": "odd-lines"})
    assert reply.status_code == 200 and b"\r" not in reply.content
    assert text_of([json.loads(line[6:]) for line in reply.text.split("\n") if line.startswith("data: {")]) == "one two"
    assert reply.text.endswith("data: [DONE]\n\n")
    assert front.receipt(reply.headers["x-request-id"])["outcome"] == "complete"
    message = {"model": "odd-lines", "max_tokens": 9, "messages": chat()["messages"], "stream": True}
    translated = front.post("messages", message).text
    assert "one " in translated and "two" in translated and "event: message_stop" in translated


@pytest.mark.parametrize(("path", "stream"), REQUESTS)
def test_an_answer_that_is_not_utf8_is_a_failed_attempt(front: Gateway, path: str, stream: bool) -> None:
    reply = front.post(path, body_of(name_of("not-utf8", path, stream), path, stream))
    assert reply.status_code == 200 and "59 " in reply.text
    attempts = front.receipt(reply.headers["x-request-id"])["attempts"]
    assert [attempts[0]["outcome"], attempts[-1]["outcome"]] == ["malformed", "ok"]


@pytest.mark.slow
@pytest.mark.parametrize("case", QUOTING)
def test_the_key_of_a_deployment_never_leaves(front: Gateway, case: str, collector: Collector) -> None:
    for path, stream in REQUESTS:
        reply = front.post(path, body_of(name_of(case, path, stream), path, stream))
        assert SECRET[:20] not in reply.text + str(reply.headers)
    with httpx2.Client(base_url=front.admin_url, headers={"authorization": f"Bearer {ADMIN_KEY}"}) as admin:
        shown = [admin.get(page).text for page in ("/admin/calls", "/admin/state", "/admin/policy")]
    files = [path.read_bytes() for path in front.log.parent.rglob("*") if path.is_file()]
    assert SECRET.encode() not in b"".join(files)  # its log, its ledger and its diagnosis
    assert SECRET not in "".join(shown)
    call_id = reply.headers["x-request-id"].encode()
    until(lambda: call_id in b"".join(collector.bodies))
    assert SECRET.encode() not in b"".join(collector.bodies)
