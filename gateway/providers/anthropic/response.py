"""Translates answers of Anthropic's Messages API to chat completions: complete messages, stream events and errors.

Thinking becomes `reasoning_content`, as in vLLM and others. `thinking_blocks` repeats it with the server's
signature. A client that sends the signed blocks back lets the model continue its thinking after a tool call. In a
stream, the pieces of a block have an `index` and are joined like the pieces of a tool call.

The first event of a stream has the prompt's token counts. A chat stream reports usage only at its end, which a call
that ends early never reaches. The first chunk therefore also reports the prompt's usage, in the field `warmpath`, which
clients may ignore.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.providers.sse import DONE, UNREADABLE, event_data, is_utf8
from gateway.providers.translation import MalformedAnswer, error_body
from gateway.providers.usage.base import TokenCount

_FINISH = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
_TIERS = {"standard": "default"}  # the other tiers have the same names in both APIs
END = "message_stop"
_TOO_LONG = "prompt is too long"  # Anthropic's message begins with this text; the error has no code
_UNFINISHED: Mapping[str, Any] = {"finish_reason": None}
KEEP_ALIVE = b": ping\n\n"

_encode = msgspec.json.encode


_ABSENT = msgspec.Raw(b"null")


class _OutputDetails(msgspec.Struct):
    thinking_tokens: TokenCount | None = None


class _Usage(msgspec.Struct):
    input_tokens: TokenCount | None = None
    output_tokens: TokenCount | None = None
    cache_read_input_tokens: TokenCount | None = None
    cache_creation_input_tokens: TokenCount | None = None
    cache_creation: dict[str, TokenCount] | None = None
    output_tokens_details: _OutputDetails | None = None
    service_tier: str | None = None

    def updated(self, later: _Usage) -> _Usage:
        """Return these counts, each replaced by the count in `later` unless that is 0. Counts are cumulative.

        Some compatible servers report the prompt's tokens only at the beginning or only at the end, and otherwise 0.
        """
        changed = {name: value for name in self.__struct_fields__ if (value := getattr(later, name))}
        return msgspec.structs.replace(self, **changed)


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
    usage: msgspec.Raw
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
    usage: msgspec.Raw = _ABSENT
    error: _Error | None = None


class _ErrorResponse(msgspec.Struct):
    error: _Error


_event = msgspec.json.Decoder(_Event).decode
_message = msgspec.json.Decoder(_Message).decode
_usage = msgspec.json.Decoder(_Usage | None, strict=False).decode
_error_response = msgspec.json.Decoder(_ErrorResponse).decode
_input = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def _read_usage(words: msgspec.Raw) -> _Usage | msgspec.Raw:
    """Return a message's token counts. Malformed counts stay as they are, because they make no answer unusable."""
    try:
        return _usage(words) or _Usage()
    except UNREADABLE:
        return words


def chat_usage(usage: _Usage | msgspec.Raw) -> dict[str, Any] | msgspec.Raw:
    """Return a chat's `usage`. Its prompt tokens include cached tokens, which the Messages API counts separately.

    Malformed counts are passed on unchanged, so that metering sees and reports them.
    """
    if isinstance(usage, msgspec.Raw):
        return usage
    creation = usage.cache_creation
    cached = usage.cache_read_input_tokens or 0
    written = usage.cache_creation_input_tokens
    if written is None:
        written = sum(creation.values()) if creation else 0
    prompt, output = (usage.input_tokens or 0) + cached + written, usage.output_tokens or 0
    fields: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
    }
    details = usage.output_tokens_details
    if details is not None and (reasoning := details.thinking_tokens) is not None:
        fields["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    if creation:
        fields["cache_creation"] = creation  # the price of a cache write depends on how long the entry is kept
    return fields


def finish_reason(stop_reason: str) -> str:
    """Return a chat's `finish_reason` for a message's `stop_reason`. Returns "stop" if the reason is unknown."""
    return _FINISH.get(stop_reason, "stop")


def chat_completion(body: bytes) -> bytes:
    """Translate a complete message to a chat completion. Raises `MalformedAnswer`."""
    try:
        source = _message(body)
    except UNREADABLE as problem:
        raise MalformedAnswer(f"the response is not a message: {problem}") from None
    usage = _read_usage(source.usage)
    text = "".join(block.text for block in source.content if block.type == "text")
    reasoning = "".join(block.thinking for block in source.content if block.type == "thinking")
    thinking_blocks = [thinking for block in source.content if (thinking := _thinking_block(block))]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": bytes(block.input).decode()}}
        for block in source.content
        if block.type == "tool_use"
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if thinking_blocks:
        message["thinking_blocks"] = thinking_blocks
    if calls:
        message["tool_calls"] = calls
    choice = {"index": 0, "message": message, "logprobs": None, **_end(source)}
    return _encode({**_head(source, usage, "chat.completion"), "choices": [choice], "usage": chat_usage(usage)})


def _end(source: _Message | _Delta) -> dict[str, str]:
    """Return the fields that say why a choice ended. As in vLLM, `stop_reason` has the stop text that matched."""
    end = {"finish_reason": finish_reason(source.stop_reason or "")}
    return end if source.stop_sequence is None else {**end, "stop_reason": source.stop_sequence}


def _head(message: _Message, usage: _Usage | msgspec.Raw, kind: str) -> dict[str, Any]:
    head = {"id": message.id, "object": kind, "created": int(time.time()), "model": message.model}
    if isinstance(usage, _Usage) and (tier := usage.service_tier):
        head["service_tier"] = _TIERS.get(tier, tier)
    return head


def _thinking_block(block: _Block) -> Mapping[str, str] | None:
    if block.type == "thinking":
        return {"type": "thinking", "thinking": block.thinking, "signature": block.signature}
    if block.type == "redacted_thinking":
        return {"type": "redacted_thinking", "data": block.data}
    return None


def openai_error(body: bytes) -> bytes:
    """Translate the body of an error response to OpenAI's format. A body of another format is returned unchanged."""
    try:
        error = _error_response(body).error
    except UNREADABLE:
        return body
    code = "context_length_exceeded" if error.message.startswith(_TOO_LONG) else None
    return error_body(error.message, kind=error.type, code=code)


class MessageStreamTranslator:
    """Translates the events of one stream to chunks of a chat completion.

    `ended` becomes true with the event that ends the message. `failure` is the text of an error event.
    """

    end_marker = END

    def __init__(self) -> None:
        self.ended = False
        self.failure: str | None = None
        self._head = b""  # the fields that all chunks have in common, as JSON without its closing brace
        self._usage: _Usage | msgspec.Raw = _Usage()  # raw if some counts were malformed
        self._tools: dict[int, int] = {}  # block index -> index of the tool call
        self._with_arguments: set[int] = set()  # block indexes of tool calls that have sent arguments
        self._thinking: dict[int, int] = {}  # block index -> index of the thinking block

    def feed(self, frames: bytes) -> bytes:
        """Translate complete frames to chunks. Drops events after an end or a failure. Raises `MalformedAnswer`."""
        chunks = []
        if not is_utf8(frames):
            raise MalformedAnswer("an event of the stream is not UTF-8")
        for data in filter(None, event_data(frames)):
            try:
                event = _event(data)
                chunks.append(self._translate(event))
            except UNREADABLE as problem:
                raise MalformedAnswer(f"an event of the stream is not Anthropic's: {problem}") from None
            if self.ended or self.failure is not None:
                break
        return b"".join(chunks)

    def finish(self) -> bytes:
        """Return nothing: only `message_stop` ends a message."""
        return b""

    def _translate(self, event: _Event) -> bytes:
        kind = event.type
        if kind == "content_block_delta" and event.delta is not None:
            return self._block_delta(event.index, event.delta)
        if kind == "content_block_start" and event.content_block is not None:
            return self._block_start(event.index, event.content_block)
        if kind == "content_block_stop":
            empty = event.index in self._tools and event.index not in self._with_arguments
            return self._arguments(event.index, "{}") if empty else b""
        if kind == "message_start" and event.message is not None:
            return self._message_start(event.message)
        if kind == "message_delta":
            newer = _read_usage(event.usage)
            if isinstance(self._usage, _Usage):
                self._usage = self._usage.updated(newer) if isinstance(newer, _Usage) else newer
            delta = event.delta
            return self._delta_chunk({}, _end(delta)) if delta is not None and delta.stop_reason is not None else b""
        if kind == END:
            self.ended = True
            return self._chunk(b"[]", usage=chat_usage(self._usage)) + DONE
        if kind == "ping":
            return KEEP_ALIVE
        if kind == "error":
            error = event.error or _Error()
            self.failure = f"{error.type}: {error.message}"
        return b""  # unknown events have nothing that a chat chunk could express

    def _message_start(self, message: _Message) -> bytes:
        self._usage = _read_usage(message.usage)
        self._head = _encode(_head(message, self._usage, "chat.completion.chunk"))[:-1]
        return self._delta_chunk({"role": "assistant", "content": ""}, warmpath={"usage": chat_usage(self._usage)})

    def _block_start(self, index: int, block: _Block) -> bytes:
        if block.type == "text" and block.text:
            return self._delta_chunk({"content": block.text})
        if block.type == "tool_use":
            self._tools[index] = len(self._tools)
            arguments = ""  # usually the arguments follow in deltas
            if _input(block.input):
                arguments = bytes(block.input).decode()
                self._with_arguments.add(index)
            function = {"name": block.name, "arguments": arguments}
            call = {"index": self._tools[index], "id": block.id, "type": "function", "function": function}
            return self._delta_chunk({"tool_calls": [call]})
        if (thinking := _thinking_block(block)) is not None:
            self._thinking[index] = len(self._thinking)
            reasoning = {"reasoning_content": block.thinking} if block.thinking else {}
            part = {"index": self._thinking[index], **thinking}
            return self._delta_chunk({**reasoning, "thinking_blocks": [part]})
        return b""

    def _block_delta(self, index: int, delta: _Delta) -> bytes:
        if delta.type == "text_delta":
            return self._delta_chunk({"content": delta.text})
        if delta.type == "input_json_delta" and index in self._tools:
            return self._arguments(index, delta.partial_json) if delta.partial_json else b""
        if index in self._thinking:
            number = self._thinking[index]
            if delta.type == "thinking_delta":
                part = {"index": number, "thinking": delta.thinking}
                return self._delta_chunk({"reasoning_content": delta.thinking, "thinking_blocks": [part]})
            if delta.type == "signature_delta":
                return self._delta_chunk({"thinking_blocks": [{"index": number, "signature": delta.signature}]})
        return b""

    def _arguments(self, index: int, arguments: str) -> bytes:
        self._with_arguments.add(index)
        return self._delta_chunk({"tool_calls": [{"index": self._tools[index], "function": {"arguments": arguments}}]})

    def _delta_chunk(self, delta: Mapping[str, Any], end: Mapping[str, Any] = _UNFINISHED, **more: Any) -> bytes:
        choice = b'{"index":0,"delta":%b,"logprobs":null,%b' % (_encode(delta), _encode(end)[1:])
        return self._chunk(b"[%b]" % choice, **more)

    def _chunk(self, choices: bytes, **more: Any) -> bytes:
        if not self._head:
            raise MalformedAnswer("the stream did not begin with message_start")
        rest = b",%b}" % _encode(more)[1:-1] if more else b"}"
        return b'data: %b,"choices":%b%b\n\n' % (self._head, choices, rest)
