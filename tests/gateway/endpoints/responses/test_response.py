"""The response object for a chat's whole answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.errors import UpstreamCut
from tests.gateway.endpoints.responses.translated import TOOL, answered, check_response, read, whole_answer
from tests.openai_spec import Validate

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}}
REQUEST: dict[str, Any] = {
    "instructions": "Be brief.",
    "tools": [TOOL],
    "tool_choice": {"type": "function", "name": "look"},
    "parallel_tool_calls": False,
    "max_output_tokens": 50,
    "max_tool_calls": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_logprobs": 2,
    "metadata": {"a": "b"},
    "user": "u",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
}


def token(text: str, **fields: Any) -> dict[str, Any]:
    return {"token": text, "logprob": -0.5, "bytes": [*text.encode()], "top_logprobs": [], **fields}


def test_a_text_is_a_message() -> None:
    response = answered({"content": "Hello."})
    assert response["id"] == "resp_abc" and response["object"] == "response" and response["model"] == "served"
    assert response["status"] == "completed" and response["error"] is None and response["incomplete_details"] is None
    assert response["completed_at"] >= response["created_at"]
    part = {"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}
    message = {"id": "msg_abc00", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    assert response["output"] == [message]
    assert response["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }


def test_items_are_in_the_order_of_generation() -> None:
    message = {"content": "So.", "reasoning_content": "Hm.", "tool_calls": [CALL, {**CALL, "id": None}]}
    reasoning, message_item, call, unnamed = answered(message, "tool_calls")["output"]
    assert (reasoning["type"], reasoning["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "Hm."}])
    assert reasoning["summary"] == [] and "encrypted_content" not in reasoning
    assert message_item["content"][0]["text"] == "So."
    assert call == {
        "id": "fc_abc02", "type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at":1}',
        "status": "completed",
    }  # fmt: skip
    assert unnamed["call_id"] == "call_abc03"


def test_reasoning_under_its_newer_name() -> None:
    assert answered({"content": "x", "reasoning": "Hm."})["output"][0]["content"][0]["text"] == "Hm."
    assert len(answered({"content": "x", "reasoning": {"steps": []}})["output"]) == 1


def test_a_refusal_is_a_content_part() -> None:
    (message_item,) = answered({"content": None, "refusal": "No."})["output"]
    assert message_item["content"] == [{"type": "refusal", "refusal": "No."}]


def test_an_empty_answer_has_no_items() -> None:
    assert answered({"content": ""})["output"] == []


@pytest.mark.parametrize(
    ("finish_reason", "status", "reason"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        (None, "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("content_filter", "incomplete", "content_filter"),
    ],
)
def test_the_reason_why_the_answer_ended(finish_reason: str | None, status: str, reason: str | None) -> None:
    response = answered({"content": "x", "reasoning_content": "y"}, finish_reason)
    assert response["status"] == status
    assert response["incomplete_details"] == (None if reason is None else {"reason": reason})
    assert [item["status"] for item in response["output"]] == ["completed", status]
    assert (response["completed_at"] is None) == (status == "incomplete")


def test_only_the_last_call_is_incomplete() -> None:
    output = answered({"tool_calls": [CALL, {**CALL, "id": "c2"}]}, "length")["output"]
    assert [item["status"] for item in output] == ["completed", "incomplete"]


def test_the_response_repeats_the_requests_fields() -> None:
    response = answered({"content": "x"}, **REQUEST)
    for name, value in REQUEST.items():
        assert response[name] == ([{**TOOL, "description": None}] if name == "tools" else value)
    assert response["store"] is False


def test_absent_fields_have_their_defaults() -> None:
    response = answered({"content": "x"}, store=True)
    assert response["tools"] == [] and response["tool_choice"] == "auto" and response["parallel_tool_calls"] is True
    assert response["text"] == {"format": {"type": "text"}} and response["metadata"] == {}
    assert response["temperature"] is None and response["store"] is False and "user" not in response


def test_log_probabilities_are_those_of_the_text() -> None:
    tokens = [token("Hm."), token("</think>"), token("So"), token(" ü", bytes=None), token("<eos>")]
    answer = {"content": "So ü", "reasoning_content": "Hm."}
    translator, _ = read(include=["message.output_text.logprobs"])
    output = json.loads(translator.answer(whole_answer(answer, logprobs={"content": tokens})))["output"]
    logprobs = output[1]["content"][0]["logprobs"]
    assert logprobs == [token("So"), {**token(" ü"), "bytes": [32, 0xC3, 0xBC]}]
    translator, _ = read(include=["message.output_text.logprobs"])
    split = [token("Hm.So"), token(" ü")]
    output = json.loads(translator.answer(whole_answer(answer, logprobs={"content": split})))["output"]
    assert output[1]["content"][0]["logprobs"] == []
    translator, _ = read()
    body = whole_answer({"content": "So"}, logprobs={"content": [token("So")]})
    output = json.loads(translator.answer(body))["output"]
    assert output[0]["content"][0]["logprobs"] == []  # not requested


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": "many"}, []])
def test_missing_usage_is_omitted(usage: Any) -> None:
    body = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "usage": usage}
    assert "usage" not in json.loads(read()[0].answer(json.dumps(body).encode()))


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{}",
        b'{"choices":[]}',
        b'{"choices":[{"index":1,"message":{"content":"x"}}]}',
        b'{"choices":[{"message":{"content":5}}]}',
        b'{"choices":[{"message":{"tool_calls":[{"id":"c"}]}}]}',
        b'{"choices":[{"message":{"content":"x"},"finish_reason":"abort"}]}',
    ],
)
def test_an_answer_that_is_invalid_raises_upstream_cut(body: bytes) -> None:
    with pytest.raises(UpstreamCut):
        read()[0].answer(body)


@pytest.mark.parametrize("fields", [{}, REQUEST, {"include": ["reasoning.encrypted_content"], "stream": False}])
@pytest.mark.parametrize(
    "message",
    [
        {"content": "x"},
        {"content": ""},
        {"content": None, "refusal": "No."},
        {"content": "x", "reasoning_content": "y", "tool_calls": [CALL]},
    ],
)
@pytest.mark.parametrize("finish_reason", ["stop", "length", "content_filter"])
def test_responses_match_openais_specification(
    validate: Validate, fields: dict[str, Any], message: dict[str, Any], finish_reason: str
) -> None:
    tokens = {"content": [token("x", top_logprobs=[{"token": "x", "logprob": -0.5, "bytes": None}])]}
    translator, _ = read(**fields)
    check_response(validate, json.loads(translator.answer(whole_answer(message, finish_reason, logprobs=tokens))))
