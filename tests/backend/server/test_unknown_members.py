"""Unknown members of chat messages are passed over and named; everything else that is unknown is refused by name."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from backend.server.errors import InvalidRequest
from backend.server.requests import ChatRequest
from backend.server.unknown_members import HEADER, MAX_NAMED, decode_chat, ignored_header
from tests.backend.server.conftest import RunningServer

CALL = {"id": "c", "type": "function", "vendor": 1, "function": {"name": "f", "arguments": "{}", "parsed": {}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Rain?", "annotations": []}], "id": "m1"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "provider_specific_fields": {"a": 1}},
    {"role": "tool", "tool_call_id": "c", "content": "no", "status": "done"},
]


def body(messages: list[dict[str, Any]], **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def test_they_are_removed_and_named() -> None:
    request, ignored = decode_chat(body(MESSAGES), ChatRequest)
    assert ignored == [
        "messages[0].id",
        "messages[0].content[0].annotations",
        "messages[1].provider_specific_fields",
        "messages[1].tool_calls[0].vendor",
        "messages[1].tool_calls[0].function.parsed",
        "messages[2].status",
    ]
    plain: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "Rain?"}]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "no"},
    ]
    expected, nothing = decode_chat(body(plain), ChatRequest)
    assert request.messages == expected.messages
    assert nothing == []


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        (MESSAGES, {"x_temperature": 1}, "x_temperature"),
        ([{"role": "robot", "content": "x", "id": 1}], {}, "messages[0].role"),
        ([{"role": "user", "content": 5, "id": 1}], {}, "messages[0].content"),
        ([{"role": "user", "content": [{"type": "video_url", "video_url": {}}]}], {}, "messages[0].content[0].type"),
        (["x"], {}, "messages[0]"),
    ],
)
def test_what_else_is_wrong_is_refused_by_name(messages: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_chat(body(messages, **fields), ChatRequest)
    assert caught.value.param == param


def test_the_header_is_bounded_and_printable() -> None:
    (value,) = ignored_header([f"messages[{i}].ü\r\n{'x' * 500}" for i in range(20)]).values()
    assert value.isascii() and value.isprintable()
    assert value.endswith(f"and {20 - MAX_NAMED} more")
    assert len(value) < 1000
    assert ignored_header([]) == {}


def test_a_server_says_so(server: RunningServer) -> None:
    message = {"role": "user", "content": "Hi", "cosmic": 1}
    url = f"{server.url}/v1/chat/completions"
    for stream in (False, True):
        fields = {"model": server.model, "messages": [message], "max_tokens": 1, "stream": stream}
        reply = httpx2.post(url, json=fields)
        assert reply.status_code == 200
        assert reply.headers[HEADER] == "messages[0].cosmic"
    plain = httpx2.post(url, json={"model": server.model, "messages": [{**message, "cosmic": 1}], "cosmic": 1})
    assert plain.status_code == 400
    assert plain.json()["error"]["param"] == "cosmic"
