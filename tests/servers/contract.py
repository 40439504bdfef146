"""What every server must do behind the gateway: one check for each row of the table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import httpx2
import openai

from tests.e2e.processes import Gateway

HI: Any = [{"role": "user", "content": "What is prefix caching?"}]
PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "Looks.", "parameters": PARAMETERS}}
CALL: Any = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
LONG = "The quick brown fox jumps over the lazy dog. " * 40
YES, NOT_REPORTED = "yes", "not reported"


class NotKept(Exception):
    """A part of the contract that the server, or the gateway in front of it, does not keep. The message says which."""


def chats(front: Gateway, client: openai.OpenAI) -> str:
    answer = client.chat.completions.create(model="m", messages=HI, max_tokens=20)
    _check(bool(answer.choices) and answer.choices[0].finish_reason in ("stop", "length"), "no finish_reason")
    _check(isinstance(answer.choices[0].message.content, str), "no text")
    return YES


def streams(front: Gateway, client: openai.OpenAI) -> str:
    chunks = list(client.chat.completions.create(model="m", messages=HI, max_tokens=20, stream=True))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    _check(any(choice.finish_reason for choice in choices), "no finish_reason")
    _check(bool("".join(choice.delta.content or "" for choice in choices)), "no text")
    return YES


def reports_usage(front: Gateway, client: openai.OpenAI) -> str:
    options: Any = {"include_usage": True}
    stream = client.chat.completions.create(model="m", messages=HI, max_tokens=20, stream=True, stream_options=options)
    streamed = [chunk.usage for chunk in stream if chunk.usage]
    whole = client.chat.completions.create(model="m", messages=HI, max_tokens=20).usage
    _check(bool(streamed) and streamed[-1].prompt_tokens > 0, "no usage in streams")
    _check(whole is not None and whole.prompt_tokens > 0 and whole.completion_tokens > 0, "no usage in answers")
    receipts = front.receipts(outcome="ok")
    exact = [receipt["exact"] for receipt in receipts]
    return YES if all(exact) else f"{exact.count(True)} of {len(exact)} receipts exact"


def takes_tools(front: Gateway, client: openai.OpenAI) -> str:
    result: Any = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
    turn: Any = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    client.chat.completions.create(model="m", messages=[*HI, turn, result], tools=[TOOL], max_tokens=20)
    try:
        answer = client.chat.completions.create(
            model="m", messages=HI, tools=[TOOL], tool_choice="required", max_tokens=200
        )
    except openai.APIStatusError as error:
        return f"offered; a forced call is refused ({error.status_code})"
    return YES if answer.choices[0].message.tool_calls else "offered; a forced call is not made"


def reports_cached_tokens(front: Gateway, client: openai.OpenAI) -> str:
    messages: Any = [{"role": "user", "content": LONG}]
    for _ in range(2):
        usage = client.chat.completions.create(model="m", messages=messages, max_tokens=2).usage
    details = usage.prompt_tokens_details if usage is not None else None
    return YES if details is not None and details.cached_tokens else NOT_REPORTED


def has_errors_in_openais_form(front: Gateway, client: openai.OpenAI) -> str:
    body = {"model": "m", "messages": HI, "max_tokens": 2, "response_format": {"type": "nonsense"}}
    reply = front.post("chat/completions", body)
    if reply.status_code == 200:
        return "ignores an unknown response_format"
    error = reply.json().get("error")
    _check(isinstance(error, dict) and isinstance(error.get("message"), str), f"no error object: {reply.text[:80]}")
    return f"yes ({reply.status_code})"


def embeds(front: Gateway, client: openai.OpenAI) -> str:
    for encoding in ("float", "base64"):
        answer = client.embeddings.create(model="m", input=["hello", "hello there"], encoding_format=encoding)
        vectors = [item.embedding for item in answer.data]
        _check(len(vectors) == 2 and len(vectors[0]) == len(vectors[1]) > 0, f"no two vectors as {encoding}")
    receipts = front.receipts(operation="embeddings")
    counted = [receipt["input_uncached"] > 0 and receipt["exact"] for receipt in receipts]
    _check(bool(counted), "no receipt")
    return YES if all(counted) else "yes, without usage"


def reranks(front: Gateway, client: openai.OpenAI) -> str:
    body = {"model": "m", "query": "What is a cache?", "documents": ["A cache keeps answers.", "Rome is a city."]}
    reply = front.post("rerank", body)
    _check(reply.status_code == 200, f"status {reply.status_code}: {reply.text[:80]}")
    results = reply.json()["results"]
    _check(sorted(result["index"] for result in results) == [0, 1], "not a result for each document")
    _check(all(isinstance(result["relevance_score"], float) for result in results), "no relevance_score")
    (receipt,) = front.receipts(operation="rerank")
    return YES if receipt["input_uncached"] and receipt["exact"] else "yes, without usage"


def has_errors_of_embeddings(front: Gateway, client: openai.OpenAI) -> str:
    reply = front.post("embeddings", {"model": "m", "input": {"a": 1}})
    error = reply.json().get("error")
    _check(reply.status_code in range(400, 500), f"status {reply.status_code}")
    _check(isinstance(error, dict) and isinstance(error.get("message"), str), f"no error object: {reply.text[:80]}")
    return f"yes ({reply.status_code})"


def _check(kept: bool, problem: str) -> None:
    if not kept:
        raise NotKept(problem)


CONTRACT: Mapping[str, Callable[[Gateway, openai.OpenAI], str]] = {
    "chats": chats,
    "streams": streams,
    "usage": reports_usage,
    "tools": takes_tools,
    "cached tokens": reports_cached_tokens,
    "errors": has_errors_in_openais_form,
    "embeddings": embeds,
    "reranks": reranks,
    "errors of embeddings": has_errors_of_embeddings,
}
CHATS = ("chats", "streams", "usage", "tools", "cached tokens", "errors")
EMBEDDINGS = ("embeddings", "errors of embeddings")


def kept_by(front: Gateway, parts: Collection[str]) -> dict[str, str]:
    """Check these parts of the contract. Returns what was found, which begins with `failed` where it is not kept."""
    found: dict[str, str] = {}
    with front.client(_strict_response_validation=False, timeout=300) as client:
        for name in parts:
            try:
                found[name.partition(" of ")[0]] = CONTRACT[name](front, client)
            except (NotKept, openai.OpenAIError, httpx2.HTTPError) as problem:
                found[name.partition(" of ")[0]] = f"failed: {' '.join(str(problem).split())[:120]}"
    return found
