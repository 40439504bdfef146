"""A scripted server of the Messages API that caches prompts and counts tokens, behind a gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.lib.streaming._deltas import accumulate_delta

from tests.e2e.faults.upstreams import Behaviour, Request, Upstreams, listening
from tests.e2e.processes import Gateway, gateway, simple_policy
from tests.gateway.providers.anthropic.sdk import check_events, check_message, read_request
from tests.gateway.providers.scripted_server import STREAM_END, STREAM_HEAD, chunked, json_response
from tests.gateway.providers.wires import (
    MESSAGE_STOP,
    block_delta,
    block_start,
    block_stop,
    event,
    message,
    message_delta,
    message_start,
    messages_error,
)

PRICE = {
    "input": "3", "cached_input": "0.30", "cache_write": "3.75", "cache_write_1h": "6", "output": "15", "version": "x",
}  # fmt: skip
BUCKETS = {"input_uncached": "input", "cache_read": "cached_input", "cache_write": "cache_write", "output": "output"}
LOOK_BACK_BLOCKS = 20
HOUR = {"type": "ephemeral", "ttl": "1h"}
RULES = {"role": "system", "content": "Be exact. " * 200}
QUESTION: Any = {"role": "user", "content": "What is the weather in Rome?"}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


class Cache:
    """A prefix cache with Anthropic's rules: writes at breakpoints, and finds prefixes up to 20 blocks before one.

    A token is four bytes.
    """

    def __init__(self) -> None:
        self._prefixes: set[str] = set()

    def take(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the usage of the prompt, and cache it."""
        turns = [(turn["role"], block) for turn in request["messages"] for block in turn["content"]]
        blocks = [*(("tool", t) for t in request.get("tools", [])), *(("system", s) for s in request.get("system", []))]
        prompt, marks, hours = [], [], []
        for role, block in [*blocks, *turns]:
            mark = block.pop("cache_control", None)
            prompt.append(json.dumps([role, block]))
            if mark:
                marks.append(len(prompt))
                hours.append(mark.get("ttl") == "1h")
        assert len(marks) <= 4
        found = [n for mark in marks for n in range(mark, max(mark - LOOK_BACK_BLOCKS, 0), -1) if self._key(prompt, n)]
        read, written = max(found, default=0), marks[-1] if marks else 0
        self._prefixes |= {"".join(prompt[:mark]) for mark in marks}
        write_tokens = tokens(prompt[read:written])
        used_ttl = "ephemeral_1h_input_tokens" if any(hours) else "ephemeral_5m_input_tokens"
        other_ttl = "ephemeral_5m_input_tokens" if any(hours) else "ephemeral_1h_input_tokens"
        return {
            "input_tokens": tokens(prompt[max(read, written) :]), "cache_read_input_tokens": tokens(prompt[:read]),
            "cache_creation_input_tokens": write_tokens, "cache_creation": {used_ttl: write_tokens, other_ttl: 0},
            "service_tier": "standard",
        }  # fmt: skip

    def _key(self, prompt: list[str], count: int) -> bool:
        return "".join(prompt[:count]) in self._prefixes


def tokens(parts: list[str]) -> int:
    return sum(map(len, parts)) // 4


class Claude:
    """A scripted deployment. With a tool, it thinks, calls it, and answers with its result; else it says hello."""

    def __init__(self) -> None:
        self.cache = Cache()
        self.counted: list[dict[str, Any]] = []

    async def __call__(self, request: Request) -> None:
        message_request = (
            read_request(json.dumps(request.body).encode()) if request.path == "/v1/messages" else request.body
        )
        if request.path == "/v1/messages/count_tokens":
            await request.write(json_response(b'{"input_tokens": 42}'))
            return
        content = self._answer(message_request)
        reason = "tool_use" if content[-1]["type"] == "tool_use" else "end_turn"
        counts = self.cache.take(message_request)
        self.counted.append({**counts, "output_tokens": 17, "output_tokens_details": {"thinking_tokens": 5}})
        if message_request.get("stream"):
            stream = streamed(content, reason, {**counts, "output_tokens": 1}, self.counted[-1])
            check_events(stream)
            await request.write(STREAM_HEAD + chunked(stream) + STREAM_END)
        else:
            body = json.dumps(message(content, self.counted[-1], stop_reason=reason)).encode()
            check_message(body)
            await request.write(json_response(body))

    def _answer(self, message_request: dict[str, Any]) -> list[dict[str, Any]]:
        last = message_request["messages"][-1]["content"]
        if last[0]["type"] == "tool_result":
            thinking = message_request["messages"][-2]["content"][0]
            assert thinking == {"type": "thinking", "thinking": "I must look.", "signature": "c2lnbmVk"}
            return [{"type": "text", "text": f"It is {last[0]['content'][0]['text']}."}]
        if "tools" in message_request:
            return [
                {"type": "thinking", "thinking": "I must look.", "signature": "c2lnbmVk"},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}},
            ]
        return [{"type": "text", "text": "Hello there."}]


def streamed(content: list[dict[str, Any]], reason: str, first: dict[str, Any], last: dict[str, Any]) -> bytes:
    events = [message_start(first), event(type="ping")]
    for index, block in enumerate(content):
        match block["type"]:
            case "text":
                events += [block_start(index, type="text", text="")]
                events += [block_delta(index, type="text_delta", text=word) for word in block["text"].split(" ")]
            case "thinking":
                events += [block_start(index, type="thinking", thinking="", signature="")]
                events += [block_delta(index, type="thinking_delta", thinking=block["thinking"])]
                events += [block_delta(index, type="signature_delta", signature=block["signature"])]
            case "tool_use":
                events += [block_start(index, **{**block, "input": {}})]
                events += [block_delta(index, type="input_json_delta", partial_json=json.dumps(block["input"]))]
        events += [block_stop(index)]
    counts = {name: last[name] for name in ("output_tokens", "output_tokens_details")}
    return b"".join([*events, message_delta(reason, **counts), MESSAGE_STOP])


@contextmanager
def in_front_of(folder: Path, **behaviours: Behaviour) -> Iterator[tuple[Gateway, openai.OpenAI, Upstreams]]:
    """A gateway with several deployments of one model. Those named `chat...` speak OpenAI's dialect.

    Messages are translated, too. test_native_apis.py has those that pass unchanged.
    """
    with listening(behaviours) as upstreams:
        servers: list[dict[str, Any]] = [
            {
                "name": name, "provider": "openai" if name.startswith("chat") else "anthropic", "model": "claude",
                "base_url": f"http://127.0.0.1:{upstreams.ports[name]}/v1", "price": PRICE,
                "api_key": {"env": "KEY_AT_CLAUDE"}, "native": [],
            }
            for name in behaviours
        ]  # fmt: skip
        policy = simple_policy(
            "http://unused",
            deployments=servers,
            models=[{"name": "m", "deployments": list(behaviours)}],
            classes={"realtime": {"inter_token": "1s"}},
            routing={"strategy": "round_robin"},
        )
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("KEY_AT_CLAUDE", "sk-ant-secret")
            with gateway(folder, policy) as front, front.client() as client:
                yield front, client, upstreams


def billed(receipt: dict[str, Any]) -> dict[str, int]:
    names = ("input_uncached", "cache_read", "cache_write", "cache_write_1h", "output", "reasoning")
    return {name: receipt.get(name, 0) for name in names}


def as_counted(counts: dict[str, Any]) -> dict[str, int]:
    """Return the ledger's buckets for Anthropic's usage."""
    return {
        "input_uncached": counts["input_tokens"], "cache_read": counts["cache_read_input_tokens"],
        "cache_write": counts["cache_creation_input_tokens"],
        "cache_write_1h": counts["cache_creation"]["ephemeral_1h_input_tokens"],
        "output": counts["output_tokens"], "reasoning": counts["output_tokens_details"]["thinking_tokens"],
    }  # fmt: skip


def cost_of(buckets: dict[str, int]) -> Decimal:
    hour = buckets["cache_write_1h"]
    parts = {**buckets, "cache_write": buckets["cache_write"] - hour}
    sums = [parts[bucket] * Decimal(PRICE[price]) for bucket, price in BUCKETS.items()]
    return (sum(sums) + hour * Decimal(PRICE["cache_write_1h"])) / 1_000_000


def whole_turn(
    client: openai.OpenAI, messages: list[Any], **fields: Any
) -> tuple[dict[str, Any], openai.types.CompletionUsage]:
    """Stream one answer, and return the assistant's message to send back, and its usage."""
    stream = client.chat.completions.create(
        model="m", messages=messages, stream=True, stream_options={"include_usage": True}, **fields
    )
    turn: dict[Any, Any] = {}
    for chunk in stream:
        for choice in chunk.choices:
            turn = accumulate_delta(turn, choice.delta.to_dict())
    assert chunk.usage is not None
    return turn, chunk.usage


def rejecting(status: str, kind: str, text: str, *headers: str) -> Behaviour:
    async def reject(request: Request) -> None:
        await request.write(json_response(json.dumps(messages_error(kind, text)).encode(), status, *headers))

    return reject
