"""Chats translated to Gemini's API and back: tools, media, thinking, output formats, usage and blocked prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.billing.metering import Meter
from gateway.policy import Deployment
from gateway.providers import make_provider
from gateway.providers.base import ProviderFailure
from gateway.providers.gemini.response import GeminiStreamTranslator, chat_completion
from gateway.providers.transport import HTTPTransport
from gateway.types import Usage
from tests.gateway.calls import a_call
from tests.gateway.providers.wires import GEMINI_COUNTED, data, gemini

USER: dict[str, Any] = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}}
FUNCTION = {"type": "function", "function": {"name": "weather", "description": "Look.", "parameters": SCHEMA}}


def rendered(messages: list[dict[str, Any]], *, model: str = "gemini-3-pro", **fields: Any) -> dict[str, Any]:
    deployment = Deployment(name="d", provider="gemini", base_url="http://x/v1beta", model=model)
    provider = make_provider(deployment, HTTPTransport(), lambda _: "")
    body = {"model": "m", "messages": messages, **fields}
    found: dict[str, Any] = json.loads(provider.render(a_call(body)))
    return found


def rejected_param(messages: list[dict[str, Any]], **fields: Any) -> str:
    with pytest.raises(ProviderFailure) as raised:
        rendered(messages, **fields)
    return str(json.loads(raised.value.body)["error"]["param"])


def called(signature: str | None = None) -> dict[str, Any]:
    extra = {} if signature is None else {"extra_content": {"google": {"thought_signature": signature}}}
    function = {"name": "weather", "arguments": '{"town": "Rome"}'}
    return {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function, **extra}]}


def test_a_conversation_with_tools() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        called("c2ln"),
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c1", "content": '{"sun": 1.0}'},
        {"role": "system", "content": "Later."},
    ]
    choice = {"type": "function", "function": {"name": "weather"}}
    call = {"functionCall": {"id": "c1", "name": "weather", "args": {"town": "Rome"}}, "thoughtSignature": "c2ln"}
    results = [{"output": "sunny"}, {"sun": 1.0}]
    assert rendered(messages, tools=[FUNCTION], tool_choice=choice) == {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "hi"}]},
            {"role": "model", "parts": [call]},
            {
                "role": "user",
                "parts": [
                    *({"functionResponse": {"id": "c1", "name": "weather", "response": each}} for each in results),
                    {"text": "Later."},
                ],
            },
        ],
        "tools": [
            {"functionDeclarations": [{"name": "weather", "description": "Look.", "parametersJsonSchema": SCHEMA}]}
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["weather"]}},
    }


def test_a_call_without_its_signature_is_not_checked_by_models_that_require_one() -> None:
    (part,) = rendered([USER, called()])["contents"][1]["parts"]
    assert part["thoughtSignature"] == "skip_thought_signature_validator"
    (part,) = rendered([USER, called()], model="gemini-2.5-flash")["contents"][1]["parts"]
    assert "thoughtSignature" not in part


def test_media_pass_as_data_or_by_url() -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}},
        {"type": "image_url", "image_url": {"url": "https://example.com/a.jpg?x=1"}},
        {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "https://example.com/v"}},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,QUJD", "filename": "a.pdf"}},
    ]
    assert rendered([{"role": "user", "content": parts}])["contents"][0]["parts"] == [
        {"inlineData": {"mimeType": "image/png", "data": "QUJD"}},
        {"fileData": {"fileUri": "https://example.com/a.jpg?x=1", "mimeType": "image/jpeg"}},
        {"inlineData": {"mimeType": "audio/wav", "data": "QUJD"}},
        {"fileData": {"fileUri": "https://example.com/v"}},
        {"inlineData": {"mimeType": "application/pdf", "data": "QUJD"}},
    ]


def test_settings_of_the_output() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    config = rendered([USER], n=2, top_k=5, stop="x", max_tokens=9, seed=1, response_format=schema, user="u")
    assert config["generationConfig"] == {
        "candidateCount": 2, "topK": 5, "stopSequences": ["x"], "maxOutputTokens": 9, "seed": 1,
        "responseMimeType": "application/json", "responseJsonSchema": SCHEMA,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "effort", "thinking"),
    [
        ("gemini-3-pro", "high", {"thinkingLevel": "HIGH", "includeThoughts": True}),
        ("gemini-3-pro", "none", {"thinkingLevel": "MINIMAL"}),
        ("gemini-2.5-flash", "medium", {"thinkingBudget": 8192, "includeThoughts": True}),
        ("gemini-2.5-flash", "none", {"thinkingBudget": 0, "includeThoughts": False}),
    ],
)
def test_reasoning_effort(model: str, effort: str, thinking: dict[str, Any]) -> None:
    assert rendered([USER], model=model, reasoning_effort=effort)["generationConfig"]["thinkingConfig"] == thinking


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([USER], {"logprobs": True}, "logprobs"),
        ([USER], {"something_new": 1}, "something_new"),
        ([USER], {"cached_content": "cachedContents/another-tenants"}, "cached_content"),
        ([USER], {"reasoning_effort": "most"}, "reasoning_effort"),
        ([USER], {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ([USER, {"role": "tool", "tool_call_id": "no", "content": ""}], {}, "messages[1].tool_call_id"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], {}, "messages[0].content[0].input_audio"),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image_url",
                            "image_url": {"url": "https://generativelanguage.googleapis.com/v1beta/files/f"},
                        }
                    ],
                }
            ],
            {},
            "messages[0].content[0].image_url.url",
        ),
    ],
)
def test_what_cannot_be_expressed_is_rejected_by_its_path(
    messages: list[dict[str, Any]], fields: dict[str, Any], param: str
) -> None:
    assert rejected_param(messages, **fields) == param


COUNTS = {
    "promptTokenCount": 100, "cachedContentTokenCount": 60, "candidatesTokenCount": 20, "thoughtsTokenCount": 30,
    "toolUsePromptTokenCount": 5, "totalTokenCount": 155,
    "promptTokensDetails": [{"modality": "AUDIO", "tokenCount": 8}],
}  # fmt: skip
THOUGHT = {"text": "Hmm", "thought": True}
CALL = {"functionCall": {"name": "weather", "args": {"town": "Rome"}}, "thoughtSignature": "c2ln"}


def test_an_answer_with_thoughts_and_calls_is_counted_to_the_token() -> None:
    body = json.dumps(gemini([THOUGHT, {"text": "Hi"}, CALL], "STOP", **COUNTS)).encode()
    answer = json.loads(chat_completion(body))
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("Hi", "Hmm")
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"town": "Rome"}
    assert call["extra_content"] == {"google": {"thought_signature": "c2ln"}}
    meter = Meter(a_call({"model": "m", "messages": [USER]}), None)
    meter.watch(json.dumps(answer).encode())
    assert meter.usage == Usage(input_uncached=45, cache_read=60, output=50, reasoning=30, audio_input=8, exact=True)


def test_a_stream_of_an_older_model_ends_with_its_body() -> None:
    """It sets `finishReason` in every event."""
    translator = GeminiStreamTranslator()
    sent = translator.feed(
        data(gemini([{"text": "H"}], "STOP")) + data(gemini([{"text": "i"}], "STOP", **GEMINI_COUNTED))
    )
    assert b'finish_reason":"stop' not in sent and not translator.ended
    sent += translator.finish()
    events = [json.loads(event[6:]) for event in sent.split(b"\n\n")[:-2]]
    assert "".join(c["delta"].get("content", "") for e in events for c in e["choices"]) == "Hi"
    assert [c["finish_reason"] for e in events for c in e["choices"]][-1] == "stop"
    assert sent.endswith(b"data: [DONE]\n\n") and translator.ended


def test_calls_of_a_stream_are_numbered() -> None:
    translator = GeminiStreamTranslator()
    sent = translator.feed(data(gemini([CALL])) + data(gemini([CALL], "STOP"))) + translator.finish()
    events = [json.loads(event[6:]) for event in sent.split(b"\n\n")[:-2]]
    calls = [call for e in events for c in e["choices"] for call in c["delta"].get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1] and len({call["id"] for call in calls}) == 2
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_blocked_prompt_is_a_filtered_answer(stream: bool) -> None:
    blocked = {"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {"promptTokenCount": 4}, "responseId": "r"}
    if stream:
        translator = GeminiStreamTranslator()
        sent = translator.feed(data(blocked)) + translator.finish()
        assert b'"finish_reason":"content_filter"' in sent and translator.ended
    else:
        (choice,) = json.loads(chat_completion(json.dumps(blocked).encode()))["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("content_filter", "")
