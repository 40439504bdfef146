"""Signed thinking and cache breakpoints of Anthropic's client, through deployments of both dialects."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.e2e.claude import (
    HOUR,
    QUESTION,
    TOOL,
    Claude,
    as_counted,
    billed,
    cost_of,
    in_front_of,
    rejecting,
    whole_turn,
)
from tests.e2e.faults.upstreams import Request
from tests.e2e.processes import PATIENCE_SECONDS, key

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_signed_thinking_is_sent_to_its_deployment_only(tmp_path: Path) -> None:
    """A strict deployment takes over in the middle of a conversation."""

    async def strict(request: Request) -> None:
        if any("thinking_blocks" in each for each in request.body["messages"]):
            await request.refuse("400 Bad Request", code="unknown_parameter")
        else:
            await request.whole(3)

    async def once(request: Request) -> None:
        if request.number:
            await rejecting("529 Overloaded", "overloaded_error", "Overloaded", "retry-after: 60")(request)
        else:
            await claude(request)

    claude = Claude()
    with in_front_of(tmp_path, claude=once, chat=strict) as (front, client, upstreams):
        messages: list[Any] = [QUESTION]
        while not upstreams.request_count("claude"):
            turn, _ = whole_turn(client, messages, tools=[TOOL])
        messages += [turn, {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "content": "sunny"}]
        assert turn["thinking_blocks"]
        for _ in range(2):
            turn, _ = whole_turn(client, messages, tools=[TOOL])
            assert turn["content"] == "0 1 2 "
        used = {attempt["deployment"] for receipt in front.receipts()[-2:] for attempt in receipt["attempts"]}
    assert used == {"claude", "chat"}


def test_anthropics_client_reaches_it_too(tmp_path: Path) -> None:
    claude = Claude()
    with in_front_of(tmp_path, claude=claude) as (front, _, upstreams):
        options: Any = {"base_url": front.url, "api_key": key("dev"), "max_retries": 0, "timeout": PATIENCE_SECONDS}
        with anthropic.Anthropic(**options) as client:
            fields: Any = {"model": "m", "messages": [QUESTION], "thinking": {"type": "disabled"}}
            reply = client.messages.create(max_tokens=50, **fields)
            assert client.messages.count_tokens(**fields).input_tokens == 42
    assert [block.text for block in reply.content if block.type == "text"] == ["Hello there."]
    assert (reply.usage.input_tokens, reply.usage.cache_creation_input_tokens) == (
        claude.counted[0]["input_tokens"], claude.counted[0]["cache_creation_input_tokens"],
    )  # fmt: skip
    assert upstreams.requests["claude"][0].body["thinking"] == {"type": "disabled"}


@pytest.mark.parametrize("streamed", [True, False])
def test_breakpoints_of_anthropics_client_are_preserved_and_billed(tmp_path: Path, streamed: bool) -> None:
    claude = Claude()
    rules: Any = {"type": "text", "text": "Be exact. " * 200, "cache_control": HOUR}
    fields: Any = {"model": "m", "max_tokens": 50, "system": [rules], "messages": [QUESTION]}
    with in_front_of(tmp_path, claude=claude) as (front, _, upstreams):
        options: Any = {"base_url": front.url, "api_key": key("dev"), "max_retries": 0, "timeout": PATIENCE_SECONDS}
        with anthropic.Anthropic(**options) as client:
            for _ in range(2):
                if streamed:
                    with client.messages.stream(**fields) as stream:
                        reply = stream.get_final_message()
                else:
                    reply = client.messages.create(**fields)
        receipts = [billed(receipt) for receipt in front.receipts()]
        costs = [Decimal(receipt["cost"]) for receipt in front.receipts()]
    body = upstreams.requests["claude"][0].body
    assert body["system"] == [rules] and "cache_control" not in json.dumps(body["messages"]), "the gateway adds none"
    assert receipts == [as_counted(counts) for counts in claude.counted]
    assert receipts[0]["cache_write_1h"] == receipts[0]["cache_write"] == receipts[1]["cache_read"] > 400
    assert costs == [cost_of(receipt) for receipt in receipts]
    assert reply.usage.cache_read_input_tokens == receipts[1]["cache_read"]


def test_signed_thinking_survives_both_translations(tmp_path: Path) -> None:
    """Anthropic's client with tools and thinking, and a deployment that requires its signature back."""
    claude = Claude()
    weather: Any = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
    fields: Any = {"model": "m", "max_tokens": 500, "tools": [weather], "thinking": {"type": "adaptive"}}
    with in_front_of(tmp_path, claude=claude) as (front, _, _):
        options: Any = {"base_url": front.url, "api_key": key("dev"), "max_retries": 0, "timeout": PATIENCE_SECONDS}
        with anthropic.Anthropic(**options) as client:
            for streamed in (True, False):
                if streamed:
                    with client.messages.stream(**fields, messages=[QUESTION]) as stream:
                        first = stream.get_final_message()
                else:
                    first = client.messages.create(**fields, messages=[QUESTION])
                assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
                call = first.content[-1]
                assert call.type == "tool_use"
                parts: Any = [{"type": "text", "text": "sunny"}]
                result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": parts}
                turns = [QUESTION, first.to_param(), {"role": "user", "content": [result]}]
                second = client.messages.create(**fields, messages=turns)
                assert [block.text for block in second.content if block.type == "text"] == ["It is sunny."]


@pytest.mark.parametrize("streamed", [True, False])
def test_signed_thinking_survives_the_responses_api(tmp_path: Path, streamed: bool) -> None:
    """OpenAI's client requests reasoning that it can send back."""
    weather: Any = {"type": "function", "strict": None, **TOOL["function"]}
    fields: Any = {
        "model": "m", "max_output_tokens": 500, "tools": [weather], "reasoning": {"effort": "high"},
        "include": ["reasoning.encrypted_content"],
    }  # fmt: skip
    items: list[Any] = [QUESTION]
    claude = Claude()
    with in_front_of(tmp_path, claude=claude) as (front, client, _):
        if streamed:
            with client.responses.stream(**fields, input=items) as stream:
                first: Any = stream.get_final_response()
        else:
            first = client.responses.create(**fields, input=items)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        items += [*first.output, {"type": "function_call_output", "call_id": "toolu_1", "output": "sunny"}]
        assert client.responses.create(**fields, input=items).output_text == "It is sunny."
        assert billed(front.receipts()[0]) == as_counted(claude.counted[0])
    assert first.usage.output_tokens_details.reasoning_tokens == 5
    assert (
        first.usage.input_tokens
        == first.usage.input_tokens_details.cache_write_tokens + (claude.counted[0]["input_tokens"])
    )
