"""OpenAI's Responses API through gateway and engine, with the unmodified `openai` client in its strict mode."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.processes import DEMO, Gateway, Running, Wire, chat, engine, gateway, simple_policy, until
from tests.gateway.endpoints.responses.translated import check_events, check_response, events_of, folded
from tests.openai_spec import Validate

pytestmark = pytest.mark.e2e

QUESTION = "What is prefix caching?"
GENERATED = "vllm:generation_tokens_total"
TOOL: Any = {
    "type": "function",
    "name": "look",
    "description": "Looks at a location.",
    "parameters": {
        "type": "object",
        "properties": {"at": {"type": "string", "enum": ["here", "there"]}},
        "required": ["at"],
        "additionalProperties": False,
    },
    "strict": True,
}
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 800}
LONG: Any = {  # an answer that fills almost the whole context of the model
    "model": DEMO,
    "input": "Count.",
    "stream": True,
    "max_output_tokens": 1800,
    "text": {"format": {"type": "json_schema", "name": "numbers", "schema": NUMBERS}},
}


class Place(BaseModel):
    at: Literal["here", "there"]


def test_a_response(local_gateway: Gateway) -> None:
    with local_gateway.client() as client:
        response = client.responses.create(
            model="demo", instructions="Be brief.", input=QUESTION, max_output_tokens=8, metadata={"job": "x"}
        )
    assert response.output_text and response.status == "incomplete"
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    assert (response.instructions, response.metadata, response.model) == ("Be brief.", {"job": "x"}, DEMO)
    assert response.usage is not None and response.usage.output_tokens == 8
    receipt = local_gateway.receipt(str(response._request_id))
    assert receipt["outcome"] == "complete" and receipt["exact"]
    assert receipt["input_uncached"] + receipt["cache_read"] == response.usage.input_tokens
    assert receipt["cache_read"] == response.usage.input_tokens_details.cached_tokens
    assert receipt["output"] == response.usage.output_tokens
    assert response.id == str(response._request_id).replace("req_", "resp_")


def test_a_stream_equals_the_whole_answer(local_gateway: Gateway) -> None:
    options: Any = {"model": DEMO, "input": QUESTION, "temperature": 0, "max_output_tokens": 200}
    with local_gateway.client() as client:
        whole = client.responses.create(**options)
        with client.responses.stream(**options) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
        plain = list(client.responses.create(**options, stream=True))
    assert whole.status == final.status == "completed"
    assert text == whole.output_text == final.output_text
    assert plain[0].type == "response.created" and plain[-1].type == "response.completed"
    assert whole.usage is not None and final.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens


async def test_the_async_client(local_gateway: Gateway) -> None:
    options: Any = {"model": DEMO, "input": QUESTION, "temperature": 0, "max_output_tokens": 60}
    async with local_gateway.async_client() as client:
        whole, parsed = await asyncio.gather(
            client.responses.create(**options),
            client.responses.parse(model=DEMO, input=QUESTION, text_format=Place),
        )
        async with client.responses.stream(**options) as stream:
            final = await stream.get_final_response()
    assert final.output_text == whole.output_text
    assert parsed.output_parsed is not None and parsed.output_parsed.at in ("here", "there")


def test_an_answer_follows_a_json_schema(local_gateway: Gateway) -> None:
    with local_gateway.client() as client:
        parsed = client.responses.parse(model=DEMO, input=QUESTION, text_format=Place)
        with client.responses.stream(model=DEMO, input=QUESTION, text_format=Place) as stream:
            streamed = stream.get_final_response()
    for response in (parsed, streamed):
        assert response.output_parsed is not None and response.output_parsed.at in ("here", "there")


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "name": "look"},
     {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]}],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_function_is_called_and_its_result_used(local_gateway: Gateway, choice: Any, stream: bool) -> None:
    items: list[Any] = [{"role": "user", "content": "Where is it?"}]
    options: Any = {"model": DEMO, "tools": [TOOL, {**TOOL, "name": "listen"}], "input": items}
    with local_gateway.client() as client:
        if stream:
            with client.responses.stream(**options, tool_choice=choice) as call_stream:
                called: Any = call_stream.get_final_response()
        else:
            called = client.responses.create(**options, tool_choice=choice)
        (*_, call) = called.output
        assert call.type == "function_call" and call.status == "completed"
        assert Place.model_validate_json(call.arguments)
        items += called.output
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "a box"})
        answer = client.responses.create(**options, tool_choice="none", max_output_tokens=8)
    assert answer.output_text and answer.usage is not None


def test_a_prompt_cached_by_chat_is_a_cache_hit(local_gateway: Gateway) -> None:
    prompt = f"{secrets.token_hex(16)} " * 10
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]
    with local_gateway.client() as client:
        by_chat = client.chat.completions.create(model=DEMO, messages=messages, max_tokens=1)
        here = client.responses.create(model=DEMO, instructions="Be brief.", input=prompt, max_output_tokens=1)
    assert by_chat.usage is not None and here.usage is not None
    assert here.usage.input_tokens == by_chat.usage.prompt_tokens
    assert here.usage.input_tokens_details.cached_tokens > 0.8 * here.usage.input_tokens


def test_input_tokens_are_counted(local_gateway: Gateway, validate: Validate) -> None:
    options: Any = {"model": DEMO, "input": QUESTION, "instructions": "Be brief.", "tools": [TOOL]}
    with local_gateway.client() as client:
        counted = client.responses.input_tokens.count(**options)
        response = client.responses.create(**options, max_output_tokens=1)
    validate("TokenCountsResource", counted.to_dict())
    assert response.usage is not None and counted.input_tokens == response.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_equal_calls_of_both_endpoints_share_the_response_cache(local_gateway: Gateway, stream: bool) -> None:
    prompt = secrets.token_hex(8)
    body = {"model": DEMO, "input": prompt, "temperature": 0, "max_output_tokens": 8, "stream": stream}
    first_reply, second_reply = (local_gateway.post("responses", body) for _ in range(2))
    assert "x-warmpath-cache" not in first_reply.headers and second_reply.headers["x-warmpath-cache"] == "hit"
    options = {"stream_options": {"include_usage": True}} if stream else {}
    by_chat = local_gateway.post(
        "chat/completions", chat(prompt, temperature=0, max_tokens=8, stream=stream, **options)
    )
    assert by_chat.headers["x-warmpath-cache"] == "hit"
    first, second = (
        events_of(reply.content)[-1]["response"] if stream else reply.json() for reply in (first_reply, second_reply)
    )
    assert first["id"] != second["id"]
    assert [item["content"] for item in first["output"]] == [item["content"] for item in second["output"]]
    assert first["usage"] == second["usage"]


def test_errors_raise_the_clients_exception_classes(local_gateway: Gateway) -> None:
    def rejection(kind: type[openai.APIStatusError], tenant: str = "dev", **changes: Any) -> openai.APIStatusError:
        options: Any = {"model": DEMO, "input": "Hello", "max_output_tokens": 8} | changes
        with local_gateway.client(tenant) as client, pytest.raises(kind) as caught:
            client.responses.create(**options)
        assert type(caught.value) is kind and caught.value.request_id and caught.value.type
        return caught.value

    assert rejection(openai.AuthenticationError, "unknown").code == "invalid_api_key"
    assert rejection(openai.PermissionDeniedError, "guest").code == "permission_denied"
    assert rejection(openai.NotFoundError, model="no-such-model").code == "model_not_found"
    assert rejection(openai.BadRequestError, max_output_tokens="many").param == "max_output_tokens"
    assert rejection(openai.BadRequestError, previous_response_id="resp_1").param == "previous_response_id"
    assert rejection(openai.BadRequestError, tools=[{"type": "telepathy"}]).param == "tools[0].type"
    assert rejection(openai.BadRequestError, temperature=99).param == "temperature"
    assert rejection(openai.BadRequestError, text={"verbosity": "loud"}).param == "text.verbosity"
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "unknown"}}
    by_engine = rejection(openai.BadRequestError, text={"format": schema})
    assert str(by_engine.param).startswith("text.format") and "text.format" in by_engine.message
    assert rejection(openai.InternalServerError, model="dead").status_code == 502
    with local_gateway.client() as client:
        for missing in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError) as caught:
                missing("resp_1")
            assert caught.value.code == "not_found"
    with local_gateway.client("unknown") as client, pytest.raises(openai.AuthenticationError):
        client.responses.retrieve("resp_1")


def test_reasoning_effort_is_a_hint(local_gateway: Gateway) -> None:
    """Agents send an effort to every model, so models without reasoning ignore it. An invalid effort is rejected."""
    with local_gateway.client() as client:
        options: Any = {"model": DEMO, "input": "Hello", "max_output_tokens": 8}
        response = client.responses.create(**options, reasoning={"effort": "low"})
        assert response.output_text and response.reasoning is not None and response.reasoning.effort == "low"
        with pytest.raises(openai.BadRequestError) as rejection:
            client.responses.create(**{**options, "reasoning": {"effort": "hard"}})
        assert rejection.value.param == "reasoning.effort"


def test_limits_apply(local_gateway: Gateway) -> None:
    with Wire(local_gateway, "responses", LONG, "narrow") as client:
        client.read_until(b"event: response.output_text.delta")
        limited = local_gateway.post("chat/completions", chat(max_tokens=1), "narrow")
        assert (limited.status_code, limited.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    until(lambda: local_gateway.post("responses", {"model": DEMO, "input": "x"}, "narrow").status_code == 200)


def test_a_client_that_disconnects_pays_for_what_was_generated(local_gateway: Gateway) -> None:
    with Wire(local_gateway, "responses", LONG) as client:
        client.read_until(b"event: response.output_text.delta", times=5)
        call_id = client.header("x-request-id")
    receipt = local_gateway.receipt(call_id)
    assert receipt["outcome"] == "client_gone" and receipt["exact"]
    assert 5 <= receipt["output"] < 1800


@pytest.mark.slow
def test_a_killed_engine_ends_the_stream_with_response_failed(tmp_path: Path, validate: Validate) -> None:
    with engine(tmp_path / "engine") as mortal, gateway(tmp_path / "gateway", simple_policy(mortal.url)) as front:
        with Wire(front, "responses", LONG) as client:
            client.read_until(b"event: response.output_text.delta", times=5)
            call_id = client.header("x-request-id")
            mortal.kill()
            received = client.read_to_end()
        assert b"event: response.failed" in received and b"response.completed" not in received
        assert front.receipt(call_id)["outcome"] == "upstream_cut"
        with front.client() as sdk, pytest.raises(openai.InternalServerError):
            sdk.responses.create(model=DEMO, input="Hello")


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
        {"service_tier": "flex", "temperature": 0, "user": "u", "metadata": {"a": "b"}},
        {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 40},
        {"text": {"format": {"type": "json_object"}, "verbosity": "low"}, "instructions": "Be brief."},
        {"include": ["reasoning.encrypted_content"], "stream_options": {"include_obfuscation": True}},
    ],
)
def test_responses_match_openais_specification(
    local_gateway: Gateway, validate: Validate, extra: dict[str, Any]
) -> None:
    body = {"model": DEMO, "input": "Hello", "max_output_tokens": 6, **extra}
    check_response(validate, local_gateway.post("responses", body).json())
    events = events_of(local_gateway.post("responses", body | {"stream": True}).content)
    check_events(validate, events)
    assert folded(events) == events[-1]["response"]["output"]


def test_log_probabilities(local_gateway: Gateway) -> None:
    options: Any = {"model": DEMO, "input": QUESTION, "temperature": 0, "max_output_tokens": 5, "top_logprobs": 2}
    with local_gateway.client() as client:
        response = client.responses.create(**options, include=["message.output_text.logprobs"])
    (message,) = response.output
    assert message.type == "message" and message.content[0].type == "output_text"
    tokens = message.content[0].logprobs
    assert tokens is not None and len(tokens) == 5
    assert "".join(token.token for token in tokens) == response.output_text
    assert all(len(token.top_logprobs) == 2 for token in tokens)


def test_a_rejected_request_does_not_reach_the_engine(local_gateway: Gateway, local_engine: Running) -> None:
    before = local_engine.metric(GENERATED)
    reply = local_gateway.post("responses", {"model": DEMO, "input": "x", "truncation": "auto"})
    assert (reply.status_code, local_engine.metric(GENERATED)) == (400, before)
