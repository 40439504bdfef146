"""Translates a chat answer to Anthropic's format: a complete message, or the events of a stream.

Two differences between the formats need care in a stream:

* Usage: Anthropic's `message_start` has the length of the prompt, but engines report usage at the end of a chat.
  `message_start` therefore has zeros unless the first chunk has usage, and `message_delta` has the complete usage.
  Clients replace the numbers of `message_start` by those of `message_delta`, because both are totals.
* Tool calls: Anthropic's content blocks follow one another, but the tool calls of a chat may arrive interleaved. Only
  one block is open at a time. If another call begins before the arguments of the open block are complete, that call is
  buffered until then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.core.errors import UpstreamCut
from gateway.endpoints.chat_answers import AssistantMessage, ChatAnswer, ChatChoice, ToolCall, read_answer
from gateway.providers.sse import event_data
from gateway.providers.usage import RawUsage, normalize_usage
from gateway.types import Usage

MAX_HELD_CHARACTERS = 2**24  # limit of the buffered arguments of tool calls; far above what any model generates
INVALID_JSON = "INVALID_JSON"  # key under which invalid arguments are passed, as in Anthropic's guide
PING = b'event: ping\ndata: {"type":"ping"}\n\n'

# Anthropic's `stop_reason` for each `finish_reason` of a chat. Only a few engines send the last two.
_STOPS = {
    None: "end_turn",
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
    "eos_token": "end_turn",
    "model_length": "max_tokens",
}


# Matches the characters that decide the nesting depth of JSON: escapes, quotes and brackets.
_MARKS = re.compile(r'\\(?:.|\Z)|["{}\[\]]', re.DOTALL)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.encode


class ReplyFormat(msgspec.Struct, frozen=True):
    """The options of one reply: the message's id, and whether the client wants to see thinking."""

    message_id: str
    shows_thinking: bool = True


class _StopReason:
    """Derives Anthropic's stop reason from the choices of a complete or streamed answer."""

    def __init__(self) -> None:
        self._finish_reason: str | None = None
        self._stop_sequence: str | None = None
        self._called = False
        self._refused = False

    def add(self, choice: ChatChoice, message: AssistantMessage) -> None:
        """Record what a choice, or one delta of a choice, says about the end of the answer."""
        self._called = self._called or bool(message.tool_calls)
        self._refused = self._refused or bool(message.refusal)
        if choice.finish_reason is not None:
            self._finish_reason = choice.finish_reason
        if isinstance(choice.stop_reason, str) and choice.stop_reason:
            self._stop_sequence = choice.stop_reason

    def fields(self) -> dict[str, Any]:
        """Return `stop_reason` and `stop_sequence`. Raises `UpstreamCut` if the finish reason is not a valid end."""
        if self._finish_reason not in _STOPS:
            raise UpstreamCut(f"the deployment ended its answer with the finish reason {self._finish_reason!r}")
        reason = _STOPS[self._finish_reason]
        if reason == "end_turn":
            # Engines report 'stop' both for the normal end of an answer and for a stop sequence.
            if self._stop_sequence is not None:
                return {"stop_reason": "stop_sequence", "stop_sequence": self._stop_sequence}
            # If the client's tool choice names a tool, engines report 'stop' although the model called the tool.
            reason = "refusal" if self._refused else "tool_use" if self._called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}


def message_of(body: bytes, reply_format: ReplyFormat) -> bytes:
    """Translate a complete answer. Raises `UpstreamCut` if it cannot be translated."""
    answer, end = read_answer(body), _StopReason()
    choice, chat = answer.message
    end.add(choice, chat)
    blocks = _thinking_blocks(chat, reply_format)
    blocks += [{"type": "text", "text": text} for text in (chat.content, chat.refusal) if text]
    call_ids: set[str] = set()
    blocks += [_tool_use(call, reply_format, call_ids) for call in chat.tool_calls or ()]
    usage = {"usage": _usage(_usage_or_zero(answer.counts))}
    return _encode(_message(reply_format, answer.model, blocks) | end.fields() | usage)


class _StreamedCall:
    """A tool call in a stream. The arguments are complete when their brackets are balanced.

    Each piece of the arguments is scanned only once.
    """

    __slots__ = ("_depth", "_ended", "_escaped", "_pieces", "_quoted", "_unread", "block", "given_id")

    def __init__(self, block: dict[str, Any], given_id: str | None) -> None:
        """`given_id` is the engine's id of the call. Some engines give several calls the same id."""
        self.given_id = given_id or block["id"]
        self.block = block
        self._pieces: list[str] = []
        self._unread = 0  # index of the first piece that has not been scanned
        self._depth = 0
        self._quoted = self._escaped = self._ended = False

    @property
    def arguments(self) -> str:
        """Return the arguments that have arrived so far."""
        return "".join(self._pieces)

    @property
    def complete(self) -> bool:
        """Whether the arguments are a balanced JSON value."""
        for piece in self._pieces[self._unread :]:
            self._read(piece)
        self._unread = len(self._pieces)
        return self._ended

    def add(self, piece: str) -> None:
        """Append a piece of the arguments, which must not be empty."""
        self._pieces.append(piece)

    def _read(self, piece: str) -> None:
        begin, self._escaped = int(self._escaped), False
        for found in _MARKS.finditer(piece, begin):
            mark = found[0]
            if mark[0] == "\\":
                self._escaped = len(mark) == 1  # the next piece begins with the escaped character
            elif mark == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if mark in "{[" else -1
                self._ended = self._depth == 0


class MessageEvents:
    """Translates the stream of one chat answer to Anthropic's events, frame by frame."""

    def __init__(self, reply_format: ReplyFormat) -> None:
        self._format = reply_format
        self._begun = False
        self._kind: str | None = None  # what the open block is, or None
        self._blocks = 0
        self._calls: dict[int, _StreamedCall] = {}  # by their index in the chat
        self._call_ids: set[str] = set()
        self._incomplete: list[_StreamedCall] = []  # the first one's block is open, the others are buffered
        self._held_characters = 0  # number of characters in the arguments of `_incomplete`
        self._end = _StopReason()
        self._counts: RawUsage | None = None
        self.unsent: list[bytes] = []  # events before an error in the same chunk

    def frames(self, chunk: bytes, *, last: bool) -> bytes:
        """Return the events for complete frames. If `last`, they include the events that end the message.

        Raises `UpstreamCut` if a frame cannot be translated. `unsent` then has the events before the failed frame.
        """
        events = self.unsent
        for data in event_data(chunk):
            if not data:  # an SSE comment, which engines send to keep the connection open
                events.append(PING)
            elif data != b"[DONE]":
                events += self._chunk_events(read_answer(data))
        if last:
            events += self._message_end()
        self.unsent = []
        return b"".join(events)

    def _chunk_events(self, answer: ChatAnswer) -> Iterator[bytes]:
        self._counts = answer.counts or self._counts
        if not self._begun:
            yield self._message_start(answer.model)
        for choice in answer.choices or ():
            if choice.index == 0:  # an answer in Anthropic's format has only one choice
                message = choice.delta or AssistantMessage()
                self._end.add(choice, message)
                yield from self._content_events(message)

    def _message_start(self, model: str | None) -> bytes:
        self._begun = True
        message = _message(self._format, model, []) | {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**message, "usage": _usage(_usage_or_zero(self._counts))})

    def _content_events(self, message: AssistantMessage) -> Iterator[bytes]:
        blocks = message.thinking_blocks or ()
        for block in blocks:
            if block.type is not None:
                yield from self._end_calls_and_open(block.type, _thinking_block(block.type, data=block.data))
        if self._format.shows_thinking and message.reasoning_text:
            yield from self._text_events(
                "thinking", _thinking_block("thinking"), "thinking_delta", message.reasoning_text
            )
        for block in blocks:
            if block.signature:
                yield self._delta({"type": "signature_delta", "signature": block.signature})
        for text in (message.content, message.refusal):
            if text:
                yield from self._text_events("text", {"type": "text", "text": ""}, "text_delta", text)
        for call in message.tool_calls or ():
            yield from self._call_events(call)

    def _text_events(self, kind: str, block: dict[str, Any], delta: str, text: str) -> Iterator[bytes]:
        if self._kind != kind:
            yield from self._end_calls_and_open(kind, block)
        yield self._delta({"type": delta, kind: text})

    def _call_events(self, call: ToolCall) -> Iterator[bytes]:
        index = call.index or 0
        streamed = self._calls.get(index)
        # Some engines give every call the same index, so a new id also means a new call.
        if streamed is None or (call.id and call.id != streamed.given_id):
            streamed = self._calls[index] = _StreamedCall(_tool_use_block(call, self._format, self._call_ids), call.id)
            # Engines do not announce the end of a call. A complete call ends when the next call begins.
            if self._incomplete and self._incomplete[0].complete:
                self._incomplete.clear()
                self._held_characters = 0
            self._incomplete.append(streamed)
            if streamed is self._incomplete[0]:
                yield from self._start_call(streamed)
        if arguments := (call.function and call.function.arguments) or "":
            yield from self._argument_events(streamed, arguments)

    def _argument_events(self, call: _StreamedCall, arguments: str) -> Iterator[bytes]:
        if call not in self._incomplete:
            if not arguments.strip():  # whitespace after the end of the JSON changes nothing
                return
            raise UpstreamCut("the deployment continued a tool call that was already complete")
        self._held_characters += len(arguments)
        if self._held_characters > MAX_HELD_CHARACTERS:
            raise UpstreamCut(
                f"the deployment's tool calls have more than {MAX_HELD_CHARACTERS} characters of arguments"
            )
        call.add(arguments)
        if call is self._incomplete[0]:
            yield self._arguments(arguments)
            while len(self._incomplete) > 1 and self._incomplete[0].complete:
                yield from self._next_call()

    def _next_call(self) -> Iterator[bytes]:
        """Start the block of the next buffered call, after the open call is complete."""
        self._held_characters -= len(self._incomplete.pop(0).arguments)
        yield from self._start_call(self._incomplete[0])

    def _start_call(self, call: _StreamedCall) -> Iterator[bytes]:
        yield from self._start_block(f"tool_use {call.block['id']}", call.block)
        if arguments := call.arguments:
            yield self._arguments(arguments)

    def _arguments(self, piece: str) -> bytes:
        return self._delta({"type": "input_json_delta", "partial_json": piece})

    def _end_calls_and_open(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._end_calls()
        yield from self._start_block(kind, block)

    def _end_calls(self) -> Iterator[bytes]:
        while len(self._incomplete) > 1:
            yield from self._next_call()
        self._incomplete.clear()
        self._held_characters = 0

    def _start_block(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._stop_block()
        self._kind = kind
        self._blocks += 1
        yield _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _stop_block(self) -> Iterator[bytes]:
        if self._kind is not None:
            self._kind = None
            yield _event("content_block_stop", index=self._blocks - 1)

    def _message_end(self) -> Iterator[bytes]:
        stop = self._end.fields()
        if not self._begun:
            yield self._message_start(None)
        yield from self._end_calls()
        yield from self._stop_block()
        yield _event("message_delta", delta=stop, usage=_usage(_usage_or_zero(self._counts)))
        yield _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def _message(reply_format: ReplyFormat, model: str | None, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": reply_format.message_id,
        "type": "message",
        "role": "assistant",
        "model": model or "",
        "content": blocks,
    }


def _tool_use_block(call: ToolCall, reply_format: ReplyFormat, taken: set[str]) -> dict[str, Any]:
    """Return an empty `tool_use` block with a unique id. `taken` has the ids of earlier calls and gets the new id."""
    if call.function is None or not call.function.name:
        raise UpstreamCut("the deployment called a tool without a name")
    call_id = call.id if call.id and call.id not in taken else f"toolu_{reply_format.message_id}_{len(taken)}"
    taken.add(call_id)
    return {"type": "tool_use", "id": call_id, "name": call.function.name, "input": {}}


def _tool_use(call: ToolCall, reply_format: ReplyFormat, taken: set[str]) -> dict[str, Any]:
    arguments = ((call.function and call.function.arguments) or "{}").encode()
    try:
        parsed: Any = _object(arguments)
    except (msgspec.MsgspecError, RecursionError):  # for example a call cut by max_tokens
        parsed = {INVALID_JSON: arguments.decode()}
    return {**_tool_use_block(call, reply_format, taken), "input": parsed}


def _thinking_blocks(message: AssistantMessage, reply_format: ReplyFormat) -> list[dict[str, Any]]:
    if message.thinking_blocks:
        shown = reply_format.shows_thinking
        return [
            _thinking_block(block.type or "thinking", block.thinking if shown else "", block.signature, block.data)
            for block in message.thinking_blocks
        ]
    return (
        [_thinking_block("thinking", message.reasoning_text)]
        if reply_format.shows_thinking and message.reasoning_text
        else []
    )


def _thinking_block(kind: str, thinking: str = "", signature: str = "", data: str = "") -> dict[str, Any]:
    if kind == "redacted_thinking":
        return {"type": kind, "data": data}
    return {"type": kind, "thinking": thinking, "signature": signature}


def _usage_or_zero(counts: RawUsage | None) -> Usage:
    return (normalize_usage(counts) if counts is not None else None) or Usage()


def _usage(usage: Usage) -> dict[str, Any]:
    """Return Anthropic's usage object. Its counts do not overlap: `input_tokens` excludes cache reads and writes."""
    usage_json: dict[str, Any] = {
        "input_tokens": usage.input_uncached,
        "cache_creation_input_tokens": usage.cache_write,
        "cache_read_input_tokens": usage.cache_read,
        "output_tokens": usage.output,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }
    if usage.cache_write:
        usage_json["cache_creation"] = {
            "ephemeral_5m_input_tokens": usage.cache_write - usage.cache_write_1h,
            "ephemeral_1h_input_tokens": usage.cache_write_1h,
        }
    return usage_json
