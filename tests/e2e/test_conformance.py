"""Every operation of OpenAI's description that the gateway serves: its answer, its stream and its error match it.

An endpoint that is added, and is in the description, fails this test until an answer of it is compared. Anthropic
publishes its description as the types of its SDK.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from anthropic.pagination import SyncPage
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import BaseModel, TypeAdapter

from tests.e2e.faults.upstreams import Request, listening
from tests.e2e.processes import PATIENCE_SECONDS, PRICE, Gateway, gateway, key, simple_policy, tenant, until
from tests.gateway.providers.scripted_server import STREAM_END, STREAM_HEAD, chunked, json_response
from tests.openai_spec import Description

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

JSON, EVENTS = "application/json", "text/event-stream"
NOT_SERVED = ("unknown_url", "method_not_allowed")
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
CHAT = {"id": "chatcmpl-1", "created": 1, "model": "m"}
IMAGE = {"size": "1024x1024", "quality": "low", "background": "opaque", "output_format": "png"}
IMAGE_USAGE = {
    "total_tokens": 9, "input_tokens": 4, "output_tokens": 5,
    "input_tokens_details": {"text_tokens": 4, "image_tokens": 0},
}  # fmt: skip
SPOKEN_USAGE = {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7}
FLAGS = (
    "hate", "hate/threatening", "harassment", "harassment/threatening", "illicit", "illicit/violent", "self-harm",
    "self-harm/intent", "self-harm/instructions", "sexual", "sexual/minors", "violence", "violence/graphic",
)  # fmt: skip
RESPONSE = {
    "id": "resp_up", "object": "response", "created_at": 1, "status": "completed", "model": "m", "output": [],
    "error": None, "incomplete_details": None, "instructions": None, "metadata": {}, "parallel_tool_calls": True,
    "temperature": 1, "tool_choice": "auto", "tools": [], "top_p": 1,
}  # fmt: skip
MESSAGE = {"role": "assistant", "content": "hi", "refusal": None}
ANSWERS: dict[str, Any] = {
    "chat/completions": {
        **CHAT, "object": "chat.completion", "usage": USAGE,
        "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop", "logprobs": None}],
    },
    "completions": {
        **CHAT, "object": "text_completion", "usage": USAGE,
        "choices": [{"index": 0, "text": "hi", "finish_reason": "stop", "logprobs": None}],
    },
    "embeddings": {
        "object": "list", "model": "m", "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}],
        "usage": {"prompt_tokens": 1, "total_tokens": 1},
    },
    "responses/input_tokens": {"object": "response.input_tokens", "input_tokens": 9},
    "moderations": {
        "id": "modr-1", "model": "m",
        "results": [{
            "flagged": False, "categories": dict.fromkeys(FLAGS, False),
            "category_scores": dict.fromkeys(FLAGS, 0.1),
            "category_applied_input_types": {flag: ["text"] for flag in FLAGS},
        }],
    },
    "images/generations": {"created": 1, "data": [{"b64_json": "AA=="}], "usage": IMAGE_USAGE, **IMAGE},
    "images/edits": {"created": 1, "data": [{"b64_json": "AA=="}]},
    "images/variations": {"created": 1, "data": [{"url": "http://images.invalid/1"}]},
    "audio/transcriptions": {"text": "hi", "usage": {"type": "duration", "seconds": 2}},
    "audio/translations": {"text": "hi"},
    "messages/count_tokens": {"input_tokens": 9},
}  # fmt: skip
STREAMS: dict[str, list[Any]] = {
    "chat/completions": [
        {**CHAT, "object": "chat.completion.chunk", "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": "hi"}, "finish_reason": None, "logprobs": None}]},
        {**CHAT, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {**CHAT, "object": "chat.completion.chunk", "choices": [], "usage": USAGE},
    ],
    "images/generations": [
        {"type": "image_generation.partial_image", "b64_json": "", "created_at": 1, "partial_image_index": 0, **IMAGE},
        {"type": "image_generation.completed", "b64_json": "AA==", "created_at": 1, "usage": IMAGE_USAGE, **IMAGE},
    ],
    "images/edits": [
        {"type": "image_edit.completed", "b64_json": "AA==", "created_at": 1, "usage": IMAGE_USAGE, **IMAGE},
    ],
    "audio/speech": [
        {"type": "speech.audio.delta", "audio": "AA=="}, {"type": "speech.audio.done", "usage": SPOKEN_USAGE},
    ],
    "audio/transcriptions": [
        {"type": "transcript.text.delta", "delta": "hi"},
        {"type": "transcript.text.done", "text": "hi", "usage": {"type": "tokens", **SPOKEN_USAGE}},
    ],
}  # fmt: skip
TEXT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


async def answer(request: Request) -> None:
    """A deployment whose own answers match the description. The model `slow` never answers."""
    path = request.path.removeprefix("/v1/")
    streams = request.streams or b'name="stream"' in request.content or "stream_format" in request.body
    if request.body.get("model") == "slow":
        await request.stay_silent()
    elif streams:
        frames = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in STREAMS[path])
        end = b"data: [DONE]\n\n" if path == "chat/completions" else b""
        await request.write(STREAM_HEAD + chunked(frames + end) + STREAM_END)
    elif path == "audio/speech":
        await request.write(b"HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\ncontent-length: 4\r\n\r\nRIFF")
    else:
        await request.write(json_response(json.dumps(ANSWERS[path]).encode()))


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with listening({"up": answer}) as upstreams:
        served = {"provider": "openai", "base_url": f"http://127.0.0.1:{upstreams.ports['up']}/v1", "price": PRICE}
        deployments = [
            {"name": "plain", "model": "m", **served},
            {"name": "native", "model": "m", "native": ["responses"], **served},
            {"name": "slow", "model": "slow", **served},
            {"name": "claude", "model": "m", **served, "provider": "anthropic"},
        ]
        models = [{"name": each["name"], "deployments": [each["name"]]} for each in deployments]
        policy = simple_policy(
            "http://unused", deployments=deployments, models=models, responses={"keep": "1h"}, tenants=[tenant("dev")]
        )
        with gateway(tmp_path_factory.mktemp("conformance"), policy, drain_seconds="1") as started:
            yield started


class Caller:
    """Sends requests, and compares each answer with the description."""

    def __init__(self, front: Gateway, description: Description) -> None:
        self.compared = set[tuple[str, str]]()
        self.streamed = set[tuple[str, str]]()
        self._description = description
        self._client = httpx2.Client(
            base_url=f"{front.url}/v1", headers={"authorization": f"Bearer {key('dev')}"}, timeout=PATIENCE_SECONDS
        )

    def __call__(self, method: str, path: str, *ids: str, query: str = "", **options: Any) -> Any:
        """Send a request. `path` is the description's, whose parameters are replaced by `ids`."""
        called = path
        for name in ids:
            called = called[: called.index("{")] + name + called[called.index("}") + 1 :]
        reply = self._client.request(method, called + query, **options)
        assert reply.status_code == 200, (method, path, reply.content)
        media_type = reply.headers["content-type"].partition(";")[0]
        if media_type == EVENTS:
            lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
            events = [json.loads(line) for line in lines if line != "[DONE]"]
            assert events
            for event in events:
                self._description.validate_answer(method, path, EVENTS, event)
            self.streamed.add((method, path))
            return events
        self.compared.add((method, path))
        if media_type != JSON:
            return reply.content
        self._description.validate_answer(method, path, JSON, reply.json())
        return reply.json()

    def error_code(self, method: str, path: str) -> str | None:
        """Send an empty request. Returns the error's code, or None if it is no error."""
        reply = self._client.request(method, path.replace("{", "").replace("}", "").split("?")[0])
        if reply.status_code == 200:
            return None
        self._description.validate("ErrorResponse", reply.json())
        return str(reply.json()["error"]["code"])

    def close(self) -> None:
        self._client.close()


def call_generation(call: Caller) -> None:
    call("GET", "/models")
    call("GET", "/models/{model}", "plain")
    for more in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        call("POST", "/chat/completions", json={"model": "plain", **TEXT, **more})
    call("POST", "/completions", json={"model": "plain", "prompt": "hi"})
    call("POST", "/embeddings", json={"model": "plain", "input": "hi"})
    call("POST", "/moderations", json={"model": "plain", "input": "hi"})
    call("POST", "/images/generations", json={"model": "plain", "prompt": "hi"})
    call("POST", "/images/generations", json={"model": "plain", "prompt": "hi", "stream": True})
    call("POST", "/audio/speech", json={"model": "plain", "input": "hi", "voice": "x"})
    call("POST", "/audio/speech", json={"model": "plain", "input": "hi", "voice": "x", "stream_format": "sse"})
    for path, field in (
        ("/images/edits", "image"), ("/images/variations", "image"), ("/audio/transcriptions", "file"),
        ("/audio/translations", "file"),
    ):  # fmt: skip
        form: Any = {"data": {"model": "plain"}, "files": {field: ("a", b"abc")}}
        call("POST", path, **form)
        if path.removeprefix("/") in STREAMS:
            call("POST", path, **{**form, "data": {"model": "plain", "stream": "true"}})


def call_stored_chats(call: Caller) -> None:
    # The description of stored messages knows no role but this one.
    messages = [{"role": "assistant", "content": "hi"}]
    name = call("POST", "/chat/completions", json={"model": "plain", "store": True, "messages": messages})["id"]
    path = "/chat/completions/{completion_id}"
    assert call("GET", "/chat/completions")["data"]
    call("GET", path, name)
    call("POST", path, name, json={"metadata": {"a": "b"}})
    call("GET", f"{path}/messages", name)
    call("DELETE", path, name)


def call_responses(call: Caller) -> None:
    path, body = "/responses/{response_id}", {"model": "plain", "input": "hi"}
    name = call("POST", "/responses", json=body)["id"]
    call("POST", "/responses", json={**body, "stream": True, "previous_response_id": name})
    call("GET", path, name)
    assert call("GET", f"{path}/input_items", name)["data"]
    call("POST", "/responses/input_tokens", json={**body, "model": "native"})
    call("POST", "/responses/compact", json=body)
    slow = call("POST", "/responses", json={**body, "model": "slow", "background": True})["id"]
    assert call("POST", f"{path}/cancel", slow)["status"] == "cancelled"
    for each in (slow, name):
        call("DELETE", path, each)


def call_conversations(call: Caller) -> None:
    path, item = "/conversations/{conversation_id}", {"type": "message", "role": "user", "content": "hi"}
    name = call("POST", "/conversations", json={"items": [item], "metadata": {"a": "b"}})["id"]
    response = {"model": "plain", "input": "ho", "conversation": name}
    assert call("POST", "/responses", json=response)["conversation"] == {"id": name}
    call("GET", path, name)
    call("POST", path, name, json={"metadata": {}})
    added = call("POST", f"{path}/items", name, json={"items": [item]})["data"][0]["id"]
    assert len(call("GET", f"{path}/items", name)["data"]) == 4
    call("GET", f"{path}/items/{{item_id}}", name, added)
    call("DELETE", f"{path}/items/{{item_id}}", name, added)
    call("DELETE", path, name)


def call_batches(call: Caller) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "slow", **TEXT}}
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", json.dumps(line).encode())}}
    file = call("POST", "/files", **form)["id"]
    call("GET", "/files")
    call("GET", "/files/{file_id}", file)
    call("GET", "/files/{file_id}/content", file)
    batch = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    name = call("POST", "/batches", json=batch)["id"]
    call("GET", "/batches")
    call("POST", "/batches/{batch_id}/cancel", name)
    until(lambda: call("GET", "/batches/{batch_id}", name)["status"] == "cancelled")
    call("DELETE", "/files/{file_id}", file)


def test_every_served_operation_matches_the_description(front: Gateway, description: Description) -> None:
    with contextlib.closing(Caller(front, description)) as call:
        for group in (call_generation, call_stored_chats, call_responses, call_conversations, call_batches):
            group(call)
        served = {
            operation for operation in description.operations
            if "?" not in operation[1] and call.error_code(*operation) not in NOT_SERVED
        }  # fmt: skip
        assert served == call.compared
        assert served & {*description.streaming} == call.streamed


def undeclared(value: Any, path: str = "") -> list[str]:
    """The fields in an answer that its type does not declare."""
    if isinstance(value, list):
        return [name for number, each in enumerate(value) for name in undeclared(each, f"{path}[{number}]")]
    if not isinstance(value, BaseModel):
        return []
    declared = [f"{path}.{name}" for name in value.model_extra or ()]
    return declared + [
        name for field in value.model_fields_set for name in undeclared(getattr(value, field, None), f"{path}.{field}")
    ]


def send_messages(front: Gateway, method: str, path: str, body: Any = None) -> httpx2.Response:
    headers = {"x-api-key": key("dev"), "anthropic-version": "2023-06-01"}
    return httpx2.request(method, f"{front.url}/v1/{path}", json=body, headers=headers, timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("method", "path", "body", "kind"),
    [
        ("POST", "messages", {"model": "plain", "max_tokens": 9, **TEXT}, Message),
        ("POST", "messages", {"model": "plain", "max_tokens": 9, "thread": {"type": "create"}, **TEXT}, BetaMessage),
        ("POST", "messages/count_tokens", {"model": "claude", **TEXT}, MessageTokensCount),
        ("GET", "models", None, SyncPage[ModelInfo]),
        ("GET", "models/plain", None, ModelInfo),
    ],
)
def test_answers_match_anthropics_types(front: Gateway, method: str, path: str, body: Any, kind: Any) -> None:
    reply = send_messages(front, method, path, body)
    assert reply.status_code == 200, reply.content
    assert undeclared(TypeAdapter(kind).validate_json(reply.content, strict=True)) == []


@pytest.mark.parametrize(("more", "kind"), [
    ({}, RawMessageStreamEvent), ({"thread": {"type": "create"}}, BetaRawMessageStreamEvent),
])  # fmt: skip
def test_streams_match_anthropics_types(front: Gateway, more: dict[str, Any], kind: Any) -> None:
    reply = send_messages(
        front, "POST", "messages", {"model": "plain", "max_tokens": 9, "stream": True, **TEXT, **more}
    )
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert len(events) > 4
    for event in events:
        assert undeclared(TypeAdapter(kind).validate_json(event, strict=True)) == [], event


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "messages", {"model": "plain"}, 400),
        ("POST", "messages", {"model": "absent", "max_tokens": 9, **TEXT}, 404),
        ("POST", "messages", {"model": "plain", "max_tokens": 9, **TEXT,
                              "thread": {"type": "continue", "previous_message_id": "msg_x"}}, 404),
        ("POST", "messages/count_tokens", {}, 400),
        ("GET", "models/absent", None, 404),
        ("PUT", "models", None, 405),
    ],
)  # fmt: skip
def test_errors_match_anthropics_types(front: Gateway, method: str, path: str, body: Any, status: int) -> None:
    reply = send_messages(front, method, path, body)
    assert reply.status_code == status
    TypeAdapter(ErrorResponse).validate_json(reply.content, strict=True)
