"""A server that answers as the prompt says, so that each client's program decides which way its agent takes.

A prompt that contains `CALL weather {"city": "Rome"}` is answered by a call of this tool, if the request offers it and
its result is not there yet. A prompt that contains `ANSWER "text"` or `ANSWER {"a": 1}` is answered by this text or
JSON. A tool's result is answered by that result. Others get a fixed text. Only what follows the last answer counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tests.e2e.faults.upstreams import PROMPT_TOKENS, Request, usage
from tests.gateway.providers.scripted_server import STREAM_END, chunked, json_response

Json = dict[str, Any]
TEXT = "Hello from the scripted server."
TOKENS = 7
PIECE_CHARACTERS = 9  # of the pieces in which a stream's text and arguments are sent


class Call(NamedTuple):
    """A tool call: the function's name as the request offers it, and its arguments as JSON."""

    name: str
    arguments: str


async def answer(request: Request) -> None:
    """Answer one request to an endpoint of OpenAI's API."""
    answers = {"/v1/embeddings": _embed, "/v1/completions": _complete}
    await answers.get(request.path, _chat)(request)


async def _chat(request: Request) -> None:
    body = request.body
    planned = plan(body["messages"], [tool["function"]["name"] for tool in body.get("tools") or ()])
    call = {"id": f"call_{request.number}", "type": "function"}
    if not request.streams:
        message: Json = {"role": "assistant", "content": planned if isinstance(planned, str) else None}
        if isinstance(planned, Call):
            message["tool_calls"] = [{**call, "function": planned._asdict()}]
        choice = {"index": 0, "message": message, "finish_reason": _reason(planned)}
        head = {"id": f"chatcmpl-{request.number}", "object": "chat.completion", "created": 1, "model": "m"}
        await request.write(json_response(_encoded({**head, "choices": [choice], "usage": usage(TOKENS)})))
        return
    await request.head()
    if isinstance(planned, str):
        for piece in _pieces(planned):
            await request.frame({"delta": {"content": piece}, "index": 0, "finish_reason": None})
    else:
        first = {"index": 0, **call, "function": {"name": planned.name, "arguments": ""}}
        await request.frame({"delta": {"tool_calls": [first]}, "index": 0, "finish_reason": None})
        for piece in _pieces(planned.arguments):
            part = {"index": 0, "function": {"arguments": piece}}
            await request.frame({"delta": {"tool_calls": [part]}, "index": 0, "finish_reason": None})
    await request.finish(_reason(planned), TOKENS)


def plan(messages: Sequence[Mapping[str, Any]], tools: Sequence[str]) -> str | Call:
    """Return the text to answer with, or the tool to call."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    recent = messages[answers[-1] + 1 :] if answers else messages
    results = [_text(message) for message in recent if message["role"] == "tool"]
    if results:
        return f"The tool said: {' '.join(results)}"
    prompt = "\n".join(_text(message) for message in recent if message["role"] == "user")
    called = _after(prompt, "CALL ")
    if called is not None:
        wanted, _, rest = called.partition(" ")
        # Clients put the server or namespace of a tool before its name.
        names = [name for name in tools if name == wanted or name.endswith(f"__{wanted}")]
        if not names:
            return f"No tool {wanted} among {', '.join(tools)}."
        return Call(names[0], json.dumps(_value(rest)))
    said = _after(prompt, "ANSWER ")
    if said is None:
        return TEXT
    value = _value(said)
    return value if isinstance(value, str) else json.dumps(value)


def _after(text: str, mark: str) -> str | None:
    _, found, rest = text.rpartition(mark)
    return rest if found else None


def _value(text: str) -> Any:
    """The JSON value with which a text begins. Some clients put the prompt in quotes. Raises ValueError."""
    if text.startswith('{\\"'):
        text = text.replace('\\"', '"')
    value, _ = json.JSONDecoder().raw_decode(text)
    return value


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text") or "" for part in content)


def _pieces(text: str) -> Iterator[str]:
    return (text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS))


def _reason(planned: str | Call) -> str:
    return "stop" if isinstance(planned, str) else "tool_calls"


async def _embed(request: Request) -> None:
    given = request.body["input"]
    count = len(given) if isinstance(given, list) and not isinstance(given[0], int) else 1
    data = [{"object": "embedding", "index": index, "embedding": [0.5, -0.5]} for index in range(count)]
    tokens = {"prompt_tokens": PROMPT_TOKENS, "total_tokens": PROMPT_TOKENS}
    await request.write(json_response(_encoded({"object": "list", "data": data, "model": "m", "usage": tokens})))


async def _complete(request: Request) -> None:
    """Answer on /completions."""
    head = {"id": f"cmpl-{request.number}", "object": "text_completion", "created": 1, "model": "m"}
    choice = {"index": 0, "text": TEXT, "finish_reason": "stop", "logprobs": None}
    whole = {**head, "choices": [choice], "usage": usage(TOKENS)}
    if not request.streams:
        await request.write(json_response(_encoded(whole)))
        return
    stream = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    event = b"data: " + _encoded(whole) + b"\n\ndata: [DONE]\n\n"
    await request.write(stream + chunked(event) + STREAM_END)


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode()
