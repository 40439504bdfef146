"""What Anthropic's Messages answer, in the words of a chat: the events of a stream, a whole message, an error.

Thinking is `reasoning_content`, as vLLM and others have it, and stands once more in `thinking_blocks` with the server's
signature. A client that sends these back with the message lets the model go on thinking where it called a tool. In a
stream their parts have an `index`, and are put together as those of tool calls are.

A stream's first event counts the prompt. A chat tells its usage at the end only, which a call that is given up never
sees: so the first chunk tells it, too, under `warmpath`, a field that no client has to know.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.providers.sse import event_data

_FINISH = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
_TIERS = {"standard": "default"}  # the others have the same names
_END = "message_stop"
_TOO_LONG = "prompt is too long"
REFUSED = "invalid_request_error"
_NO_END: Mapping[str, Any] = {"finish_reason": None}
KEEP_ALIVE = b": ping\n\n"
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


class MalformedMessage(ValueError):
    """Not what a server of this dialect says."""


class _OutputDetails(msgspec.Struct):
    thinking_tokens: int | None = None


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_creation: dict[str, int] | None = None
    output_tokens_details: _OutputDetails | None = None
    service_tier: str | None = None

    def updated(self, later: _Usage) -> _Usage:
        """Counts are cumulative. Of the servers that have Messages, too, some count the prompt at one of the two ends
        only, and say 0 at the other.
        """
        told = {name: value for name in self.__struct_fields__ if (value := getattr(later, name))}
        return msgspec.structs.replace(self, **told)


class _Block(msgspec.Struct):
    type: str
    text: str = ""
    thinking: str = ""
    signature: str = ""
    data: str = ""
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.Raw(b"{}")


class _Message(msgspec.Struct):
    id: str
    model: str
    usage: _Usage
    content: list[_Block] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None


class _Delta(msgspec.Struct):
    type: str = ""
    text: str = ""
    partial_json: str = ""
    thinking: str = ""
    signature: str = ""
    stop_reason: str | None = None
    stop_sequence: str | None = None


class _Error(msgspec.Struct):
    type: str = "error"
    message: str = ""


class _Event(msgspec.Struct):
    type: str
    index: int = 0
    message: _Message | None = None
    content_block: _Block | None = None
    delta: _Delta | None = None
    usage: _Usage | None = None
    error: _Error | None = None


class _Refusal(msgspec.Struct):
    error: _Error


_event = msgspec.json.Decoder(_Event).decode
_message = msgspec.json.Decoder(_Message).decode
_refusal = msgspec.json.Decoder(_Refusal).decode
_input = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def chat_usage(usage: _Usage) -> dict[str, Any]:
    """A chat's prompt includes what its cache has read and written; Messages count each by itself."""
    kept = usage.cache_creation
    cached = usage.cache_read_input_tokens or 0
    written = usage.cache_creation_input_tokens
    if written is None:
        written = sum(kept.values()) if kept else 0
    prompt, output = (usage.input_tokens or 0) + cached + written, usage.output_tokens or 0
    told: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
    }
    if usage.output_tokens_details is not None and (thought := usage.output_tokens_details.thinking_tokens) is not None:
        told["completion_tokens_details"] = {"reasoning_tokens": thought}
    if kept:
        told["cache_creation"] = kept  # how long the cache keeps what it wrote has prices of its own
    return told


def finish_reason(stop_reason: str) -> str:
    return _FINISH.get(stop_reason, "stop")


def chat_completion(body: bytes) -> bytes:
    """A message as a chat completion. Raises `MalformedMessage`."""
    try:
        said = _message(body)
    except (msgspec.MsgspecError, RecursionError) as problem:
        raise MalformedMessage(f"the answer is no message: {problem}") from None
    text = "".join(block.text for block in said.content if block.type == "text")
    thinking = "".join(block.thinking for block in said.content if block.type == "thinking")
    thoughts = [thought for block in said.content if (thought := _thought(block))]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": bytes(block.input).decode()}}
        for block in said.content
        if block.type == "tool_use"
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    if thinking:
        message["reasoning_content"] = thinking
    if thoughts:
        message["thinking_blocks"] = thoughts
    if calls:
        message["tool_calls"] = calls
    choice = {"index": 0, "message": message, "logprobs": None, **_end(said)}
    return _encode({**_head(said, "chat.completion"), "choices": [choice], "usage": chat_usage(said.usage)})


def _end(said: _Message | _Delta) -> dict[str, str]:
    """Of a choice. Which text of `stop` it was stands in a field of vLLM's."""
    end = {"finish_reason": finish_reason(said.stop_reason or "")}
    return end if said.stop_sequence is None else {**end, "stop_reason": said.stop_sequence}


def _head(message: _Message, kind: str) -> dict[str, Any]:
    head = {"id": message.id, "object": kind, "created": int(time.time()), "model": message.model}
    if tier := message.usage.service_tier:
        head["service_tier"] = _TIERS.get(tier, tier)
    return head


def _thought(block: _Block) -> Mapping[str, str] | None:
    if block.type == "thinking":
        return {"type": "thinking", "thinking": block.thinking, "signature": block.signature}
    if block.type == "redacted_thinking":
        return {"type": "redacted_thinking", "data": block.data}
    return None


def openai_error(body: bytes) -> bytes:
    """A refusal in OpenAI's form; as it came where it is none of Anthropic's."""
    try:
        error = _refusal(body).error
    except (msgspec.MsgspecError, RecursionError):
        return body
    code = "context_length_exceeded" if error.message.startswith(_TOO_LONG) else None
    return error_body(error.message, kind=error.type, code=code)


def error_body(message: str, *, code: str | None, kind: str = REFUSED, param: str | None = None) -> bytes:
    return _encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def ends_stream(frames: bytes) -> bool:
    """Whether one of these events ends the answer."""
    try:
        return any(_event(data).type == _END for data in event_data(frames) if data)
    except (msgspec.MsgspecError, RecursionError):
        return False


class MessageStreamTranslator:
    """Events in, chunks out. `ended` once the server has said so; `failure` is what it said instead."""

    def __init__(self) -> None:
        self.ended = False
        self.failure: str | None = None
        self._head = b""  # what all chunks have in common, as JSON without its end
        self._usage = _Usage()
        self._tools: dict[int, int] = {}  # the number of a tool call, by its block's
        self._begun: set[int] = set()  # blocks of tool calls that have said some of their arguments
        self._thoughts: dict[int, int] = {}  # likewise of thoughts

    def feed(self, frames: bytes) -> bytes:
        """Raises `MalformedMessage`. What comes behind a failure is left out."""
        chunks = []
        for data in filter(None, event_data(frames)):
            try:
                event = _event(data)
                chunks.append(self._said(event))
            except (msgspec.MsgspecError, RecursionError) as problem:
                raise MalformedMessage(f"an event of the stream is none of Anthropic's: {problem}") from None
            if self.ended or self.failure is not None:
                break
        return b"".join(chunks)

    def _said(self, event: _Event) -> bytes:
        kind = event.type
        if kind == "content_block_delta" and event.delta is not None:
            return self._more(event.index, event.delta)
        if kind == "content_block_start" and event.content_block is not None:
            return self._block(event.index, event.content_block)
        if kind == "content_block_stop":
            empty = event.index in self._tools and event.index not in self._begun
            return self._arguments(event.index, "{}") if empty else b""
        if kind == "message_start" and event.message is not None:
            return self._start(event.message)
        if kind == "message_delta":
            self._usage = self._usage.updated(event.usage or _Usage())
            delta = event.delta
            return self._chunk_of({}, _end(delta)) if delta is not None and delta.stop_reason is not None else b""
        if kind == _END:
            self.ended = True
            return self._chunk(b"[]", usage=chat_usage(self._usage)) + DONE
        if kind == "ping":
            return KEEP_ALIVE
        if kind == "error":
            error = event.error or _Error()
            self.failure = f"{error.type}: {error.message}"
        return b""  # what is new to us is nothing that a chat has

    def _start(self, message: _Message) -> bytes:
        self._head = _encode(_head(message, "chat.completion.chunk"))[:-1]
        self._usage = message.usage
        return self._chunk_of({"role": "assistant", "content": ""}, warmpath={"usage": chat_usage(message.usage)})

    def _block(self, index: int, block: _Block) -> bytes:
        if block.type == "text" and block.text:
            return self._chunk_of({"content": block.text})
        if block.type == "tool_use":
            self._tools[index] = len(self._tools)
            given = ""  # the arguments follow
            if _input(block.input):
                given = bytes(block.input).decode()
                self._begun.add(index)
            function = {"name": block.name, "arguments": given}
            call = {"index": self._tools[index], "id": block.id, "type": "function", "function": function}
            return self._chunk_of({"tool_calls": [call]})
        if (thought := _thought(block)) is not None:
            self._thoughts[index] = len(self._thoughts)
            said = {"reasoning_content": block.thinking} if block.thinking else {}
            return self._chunk_of({**said, "thinking_blocks": [{"index": self._thoughts[index], **thought}]})
        return b""

    def _more(self, index: int, delta: _Delta) -> bytes:
        if delta.type == "text_delta":
            return self._chunk_of({"content": delta.text})
        if delta.type == "input_json_delta" and index in self._tools:
            return self._arguments(index, delta.partial_json) if delta.partial_json else b""
        if index in self._thoughts:
            number = self._thoughts[index]
            if delta.type == "thinking_delta":
                part = {"index": number, "thinking": delta.thinking}
                return self._chunk_of({"reasoning_content": delta.thinking, "thinking_blocks": [part]})
            if delta.type == "signature_delta":
                return self._chunk_of({"thinking_blocks": [{"index": number, "signature": delta.signature}]})
        return b""

    def _arguments(self, index: int, arguments: str) -> bytes:
        self._begun.add(index)
        return self._chunk_of({"tool_calls": [{"index": self._tools[index], "function": {"arguments": arguments}}]})

    def _chunk_of(self, delta: Mapping[str, Any], end: Mapping[str, Any] = _NO_END, **more: Any) -> bytes:
        choice = b'{"index":0,"delta":%b,"logprobs":null,%b' % (_encode(delta), _encode(end)[1:])
        return self._chunk(b"[%b]" % choice, **more)

    def _chunk(self, choices: bytes, **more: Any) -> bytes:
        if not self._head:
            raise MalformedMessage("the stream did not begin with message_start")
        also = b",%b}" % _encode(more)[1:-1] if more else b"}"
        return b'data: %b,"choices":%b%b\n\n' % (self._head, choices, also)
