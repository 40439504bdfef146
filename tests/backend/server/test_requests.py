"""Fields of requests with their bounds, and errors that name the invalid field."""

import json

import pytest

from backend.server.errors import InvalidRequest
from backend.server.request_body import decode_body
from backend.server.requests import ChatRequest, CompletionRequest

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**fields: object) -> ChatRequest:
    request = decode_body(json.dumps({"model": "m", "messages": MESSAGES} | fields).encode(), ChatRequest)
    request.check()
    return request


def test_every_supported_field_is_read() -> None:
    request = chat(
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        max_completion_tokens=5,
        temperature=1,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.1,
        logit_bias={"17": -100},
        seed=3,
        stop="x",
        n=2,
        logprobs=True,
        top_logprobs=20,
        ignore_eos=True,
        min_tokens=1,
        stop_token_ids=[4],
        priority=-1,
        cache_salt="tenant",
        tools=[TOOL],
        tool_choice="auto",
    )
    assert request.include_usage
    assert request.continuous_usage
    assert request.stop_sequences == ["x"]
    assert request.logit_bias == {17: -100.0}
    assert request.tools == [TOOL]


def test_zero_top_logprobs_do_not_require_logprobs() -> None:
    assert chat(top_logprobs=0).logprobs is None
    with pytest.raises(InvalidRequest):
        chat(top_logprobs=1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
        ({"n": "1"}, "n"),
        ({"stream": 1}, "stream"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"seed": 2**63}, "seed"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include": True}}, "stream_options.include"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [TOOL], "tool_choice": "must"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"nom": "f"}}]}, "tools[0].function.nom"),
        ({"nonsense": 1}, "nonsense"),
        ({"model": 1}, "model"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "critic", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url.url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {}}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_an_error_names_the_field(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert param.split(".")[-1].split("[")[0] in caught.value.message


@pytest.mark.parametrize("prompt", ["text", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_the_forms_of_a_prompt(prompt: object) -> None:
    request = decode_body(json.dumps({"model": "m", "prompt": prompt}).encode(), CompletionRequest)
    assert request.prompt == prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"stream": True, "best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_an_error_of_a_completion_names_the_field(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_body(json.dumps({"model": "m", "prompt": "a"} | fields).encode(), CompletionRequest).check()
    assert caught.value.param == param
