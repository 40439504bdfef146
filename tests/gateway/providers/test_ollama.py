"""Chats and embeddings translated to Ollama's API and back: tools, images, thinking, formats and counts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.billing.metering import Meter
from gateway.policy import Deployment
from gateway.providers import make_provider
from gateway.providers.base import ProviderFailure
from gateway.providers.ollama.response import OllamaStreamTranslator, chat_completion, embedding_list
from gateway.providers.transport import HTTPTransport
from gateway.types import Operation
from tests.gateway.calls import a_call
from tests.gateway.providers.wires import OLLAMA_COUNTED, line, ollama

USER: dict[str, Any] = {"role": "user", "content": "hi"}
FUNCTION = {"name": "weather", "description": "Look.", "parameters": {"type": "object"}}
CALL = {"function": {"name": "weather", "arguments": {"town": "Rome"}}}


def rendered(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    deployment = Deployment(name="d", provider="ollama", base_url="http://x/api", model="theirs")
    provider = make_provider(deployment, HTTPTransport(), lambda _: "")
    found: dict[str, Any] = json.loads(provider.render(a_call({"model": "m", "messages": messages, **fields})))
    return found


def test_a_conversation_with_tools_and_images() -> None:
    function = {"name": "weather", "arguments": '{"town": "Rome"}'}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, image]},
        {"role": "assistant", "reasoning_content": "Hmm", "tool_calls": [{"id": "c1", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    assert rendered(messages, tools=[{"type": "function", "function": FUNCTION}], stream=True) == {
        "model": "theirs",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi", "images": ["QUJD"]},
            {"role": "assistant", "content": "", "thinking": "Hmm", "tool_calls": [{"id": "c1", **CALL}]},
            {"role": "tool", "content": "sunny", "tool_name": "weather", "tool_call_id": "c1"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "stream": True,
    }


@pytest.mark.parametrize(("name", "before"), [({"filename": "a.txt"}, "a.txt\n\n"), ({}, "")])
def test_a_text_file_is_text_after_its_name(name: dict[str, str], before: str) -> None:
    file = {"type": "file", "file": {"file_data": "data:text/plain;base64,QUJD", **name}}
    (message,) = rendered([{"role": "user", "content": [file, {"type": "text", "text": "hi"}]}])["messages"]
    assert message == {"role": "user", "content": f"{before}ABC\n\nhi"}


def test_settings_are_options() -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    body = rendered([USER], max_tokens=9, stop="x", seed=1, top_p=0.5, response_format=schema, reasoning_effort="high")
    assert body["options"] == {"seed": 1, "top_p": 0.5, "num_predict": 9, "stop": ["x"]}
    assert (body["format"], body["think"]) == ({"type": "object"}, "high")
    body = rendered([USER], response_format={"type": "json_object"}, reasoning_effort="none", tool_choice="none")
    assert (body["format"], body["think"]) == ("json", False)


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([USER], {"n": 2}, "n"),
        ([USER], {"tool_choice": "required"}, "tool_choice"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], {}, "messages[0].content[0].type"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/a.png"}}]}],
            {},
            "messages[0].content[0].image_url.url",
        ),
    ],
)
def test_what_cannot_be_expressed_is_rejected_by_its_path(
    messages: list[dict[str, Any]], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ProviderFailure) as raised:
        rendered(messages, **fields)
    assert json.loads(raised.value.body)["error"]["param"] == param


def test_a_stream_with_thinking_and_calls() -> None:
    translator = OllamaStreamTranslator("1")
    message = {"role": "assistant", "content": "", "thinking": "Hmm", "tool_calls": [CALL, CALL]}
    sent = translator.feed(
        line({**ollama(""), "message": message}) + line(ollama("", done=True, done_reason="stop", **OLLAMA_COUNTED))
    )
    assert translator.ended and sent.endswith(b"data: [DONE]\n\n")
    events = [json.loads(event[6:]) for event in sent.split(b"\n\n")[:-2]]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hmm"
    assert [call["index"] for delta in deltas for call in delta.get("tool_calls", ())] == [0, 1]
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_prompt_that_ollama_did_not_count_is_estimated() -> None:
    answer = chat_completion(json.dumps(ollama("hi", done=True, eval_count=2)).encode(), "1")
    meter = Meter(a_call({"model": "m", "messages": [{"role": "user", "content": "word " * 50}]}), None)
    meter.watch(answer)
    assert not meter.usage.exact and meter.usage.output == 2


def test_embeddings() -> None:
    given = b'{"model": "theirs", "embeddings": [[0.5], [1]], "prompt_eval_count": 3}'
    assert json.loads(embedding_list(given)) == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [0.5]},
            {"object": "embedding", "index": 1, "embedding": [1]},
        ],
        "model": "theirs",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }
    assert Operation.EMBEDDING.value == "embeddings"
