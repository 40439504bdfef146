"""A chat's answer in the words of Anthropic's wire: whole, or as events.

A stream of Anthropic's says first how long its prompt was. Servers of chat say so last, so that `message_start` has
zeros, unless counts came with the first chunk, and `message_delta` has all of the usage: its numbers are totals, which
take the place of those before.

Blocks follow each other, where a chat's tool calls may grow side by side: what begins behind a call whose arguments are
not whole yet is held back until they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from gateway.core.errors import UpstreamCut
from gateway.endpoints.chat_answers import Answer, Choice, Said, ToolCall, read_answer
from gateway.providers.sse import event_data
from gateway.providers.usage import RawUsage, normalize_usage
from gateway.types import Usage

MAX_HELD_CHARACTERS = 2**24  # of the arguments of calls: far above any model's
INVALID_JSON = "INVALID_JSON"  # under which arguments stand that are none, as Anthropic's guide has it
PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_STOPS = {  # by chat's `finish_reason`; the others are what single servers say
    None: "end_turn",
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
    "eos_token": "end_turn",
    "model_length": "max_tokens",
}


_MARKS = re.compile(r'\\(?:.|\Z)|["{}\[\]]', re.DOTALL)  # of JSON
_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.encode


class Wording(msgspec.Struct, frozen=True):
    """What a reply's form depends on."""

    message_id: str
    shows_thinking: bool = True


class _End:
    """Why an answer ended, as far as is known."""

    def __init__(self) -> None:
        self._finish_reason: str | None = None
        self._stop_sequence: str | None = None
        self._called = False
        self._refused = False

    def learn(self, choice: Choice, said: Said) -> None:
        self._called = self._called or bool(said.tool_calls)
        self._refused = self._refused or bool(said.refusal)
        if choice.finish_reason is not None:
            self._finish_reason = choice.finish_reason
        if isinstance(choice.stop_reason, str) and choice.stop_reason:
            self._stop_sequence = choice.stop_reason

    def told(self) -> dict[str, Any]:
        """Raises `UpstreamCut` for an end that is none."""
        if self._finish_reason not in _STOPS:
            raise UpstreamCut(f"the server ended its answer with {self._finish_reason!r}")
        reason = _STOPS[self._finish_reason]
        if reason == "end_turn":
            if self._stop_sequence is not None:
                return {"stop_reason": "stop_sequence", "stop_sequence": self._stop_sequence}
            # Of a call that the client has named, servers say that they stopped.
            reason = "refusal" if self._refused else "tool_use" if self._called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}


def message_of(body: bytes, wording: Wording) -> bytes:
    """A whole answer. Raises `UpstreamCut` for what can not be read."""
    answer, end = read_answer(body), _End()
    choice, said = answer.message
    end.learn(choice, said)
    blocks = _thoughts(said, wording)
    blocks += [{"type": "text", "text": text} for text in (said.content, said.refusal) if text]
    call_ids: set[str] = set()
    blocks += [_tool_use(call, wording, call_ids) for call in said.tool_calls or ()]
    message = _message(wording, answer.model, blocks) | end.told() | {"usage": _usage(_counted(answer.counts))}
    return _encode(message)


class _Call:
    """A tool call of a stream. Where its arguments end is seen by their brackets, each of which is looked at once."""

    __slots__ = ("_depth", "_ended", "_escaped", "_pieces", "_quoted", "_unread", "block", "given_id")

    def __init__(self, block: dict[str, Any], given_id: str | None) -> None:
        """`given_id` is the server's, who may give it to several."""
        self.given_id = given_id or block["id"]
        self.block = block
        self._pieces: list[str] = []
        self._unread = 0  # the first piece that was not looked at
        self._depth = 0
        self._quoted = self._escaped = self._ended = False

    @property
    def arguments(self) -> str:
        """So far."""
        return "".join(self._pieces)

    @property
    def whole(self) -> bool:
        for piece in self._pieces[self._unread :]:
            self._read(piece)
        self._unread = len(self._pieces)
        return self._ended

    def add(self, piece: str) -> None:
        """One that is not empty."""
        self._pieces.append(piece)

    def _read(self, piece: str) -> None:
        begin, self._escaped = int(self._escaped), False
        for found in _MARKS.finditer(piece, begin):
            mark = found[0]
            if mark[0] == "\\":
                self._escaped = len(mark) == 1  # what is escaped comes with the next piece
            elif mark == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if mark in "{[" else -1
                self._ended = self._depth == 0


class Events:
    """A stream's answer, frame by frame."""

    def __init__(self, wording: Wording) -> None:
        self._wording = wording
        self._begun = False
        self._kind: str | None = None  # of the block that is open
        self._blocks = 0
        self._calls: dict[int, _Call] = {}  # by the index in chat
        self._call_ids: set[str] = set()
        self._growing: list[_Call] = []  # the first one's block is open, the others are held back
        self._held_characters = 0  # of their arguments
        self._end = _End()
        self._counts: RawUsage | None = None
        self.untold: list[bytes] = []  # what came in one chunk with what can not be read

    def frames(self, chunk: bytes, *, last: bool) -> bytes:
        """Raises `UpstreamCut` for what can not be read."""
        events = self.untold
        for data in event_data(chunk):
            if not data:
                events.append(PING)
            elif data != b"[DONE]":
                events += self._of(read_answer(data))
        if last:
            events += self._ending()
        self.untold = []
        return b"".join(events)

    def _of(self, answer: Answer) -> Iterator[bytes]:
        self._counts = answer.counts or self._counts
        if not self._begun:
            yield self._beginning(answer.model)
        for choice in answer.choices or ():
            if choice.index == 0:
                said = choice.delta or Said()
                self._end.learn(choice, said)
                yield from self._said(said)

    def _beginning(self, model: str | None) -> bytes:
        self._begun = True
        message = _message(self._wording, model, []) | {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**message, "usage": _usage(_counted(self._counts))})

    def _said(self, said: Said) -> Iterator[bytes]:
        blocks = said.thinking_blocks or ()
        for block in blocks:
            if block.type is not None:
                yield from self._open(block.type, _thought_block(block.type, data=block.data))
        if self._wording.shows_thinking and said.thought:
            yield from self._part("thinking", _thought_block("thinking"), "thinking_delta", said.thought)
        for block in blocks:
            if block.signature:
                yield self._delta({"type": "signature_delta", "signature": block.signature})
        for text in (said.content, said.refusal):
            if text:
                yield from self._part("text", {"type": "text", "text": ""}, "text_delta", text)
        for call in said.tool_calls or ():
            yield from self._called(call)

    def _part(self, kind: str, block: dict[str, Any], delta: str, text: str) -> Iterator[bytes]:
        if self._kind != kind:
            yield from self._open(kind, block)
        yield self._delta({"type": delta, kind: text})

    def _called(self, call: ToolCall) -> Iterator[bytes]:
        index = call.index or 0
        known = self._calls.get(index)
        if known is None or (call.id and call.id != known.given_id):  # some servers give every call the same index
            known = self._calls[index] = _Call(_tool_use_block(call, self._wording, self._call_ids), call.id)
            if self._growing and self._growing[0].whole:
                self._growing.clear()
                self._held_characters = 0
            self._growing.append(known)
            if known is self._growing[0]:
                yield from self._open_call(known)
        if arguments := (call.function and call.function.arguments) or "":
            yield from self._more_of(known, arguments)

    def _more_of(self, call: _Call, arguments: str) -> Iterator[bytes]:
        if call not in self._growing:
            if not arguments.strip():
                return
            raise UpstreamCut("the server went back to a tool call that was over")
        self._held_characters += len(arguments)
        if self._held_characters > MAX_HELD_CHARACTERS:
            raise UpstreamCut("the arguments of the server's tool calls are longer than any may be")
        call.add(arguments)
        if call is self._growing[0]:
            yield self._arguments(arguments)
            while len(self._growing) > 1 and self._growing[0].whole:
                yield from self._next_call()

    def _next_call(self) -> Iterator[bytes]:
        """The first of those that grow is over, and the next one's turn has come."""
        self._held_characters -= len(self._growing.pop(0).arguments)
        yield from self._open_call(self._growing[0])

    def _open_call(self, call: _Call) -> Iterator[bytes]:
        yield from self._begin(f"tool_use {call.block['id']}", call.block)
        if arguments := call.arguments:
            yield self._arguments(arguments)

    def _arguments(self, piece: str) -> bytes:
        return self._delta({"type": "input_json_delta", "partial_json": piece})

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._end_calls()
        yield from self._begin(kind, block)

    def _end_calls(self) -> Iterator[bytes]:
        while len(self._growing) > 1:
            yield from self._next_call()
        self._growing.clear()
        self._held_characters = 0

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._kind = kind
        self._blocks += 1
        yield _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._kind is not None:
            self._kind = None
            yield _event("content_block_stop", index=self._blocks - 1)

    def _ending(self) -> Iterator[bytes]:
        told = self._end.told()
        if not self._begun:
            yield self._beginning(None)
        yield from self._end_calls()
        yield from self._close()
        yield _event("message_delta", delta=told, usage=_usage(_counted(self._counts)))
        yield _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def _message(wording: Wording, model: str | None, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": wording.message_id, "type": "message", "role": "assistant", "model": model or "", "content": blocks}


def _tool_use_block(call: ToolCall, wording: Wording, taken: set[str]) -> dict[str, Any]:
    """With an id of its own: `taken` are those of the calls before it, and it is added to them."""
    if call.function is None or not call.function.name:
        raise UpstreamCut("the server calls a tool, and does not say which")
    call_id = call.id if call.id and call.id not in taken else f"toolu_{wording.message_id}_{len(taken)}"
    taken.add(call_id)
    return {"type": "tool_use", "id": call_id, "name": call.function.name, "input": {}}


def _tool_use(call: ToolCall, wording: Wording, taken: set[str]) -> dict[str, Any]:
    arguments = ((call.function and call.function.arguments) or "{}").encode()
    try:
        given: Any = _object(arguments)
    except (msgspec.MsgspecError, RecursionError):  # as of a call in whose middle the tokens ran out
        given = {INVALID_JSON: arguments.decode()}
    return {**_tool_use_block(call, wording, taken), "input": given}


def _thoughts(said: Said, wording: Wording) -> list[dict[str, Any]]:
    if said.thinking_blocks:
        shown = wording.shows_thinking
        return [
            _thought_block(block.type or "thinking", block.thinking if shown else "", block.signature, block.data)
            for block in said.thinking_blocks
        ]
    return [_thought_block("thinking", said.thought)] if wording.shows_thinking and said.thought else []


def _thought_block(kind: str, thinking: str = "", signature: str = "", data: str = "") -> dict[str, Any]:
    if kind == "redacted_thinking":
        return {"type": kind, "data": data}
    return {"type": kind, "thinking": thinking, "signature": signature}


def _counted(counts: RawUsage | None) -> Usage:
    return (normalize_usage(counts) if counts is not None else None) or Usage()


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic's buckets, which do not overlap: `input_tokens` is without what the cache read or wrote."""
    told: dict[str, Any] = {
        "input_tokens": usage.input_uncached,
        "cache_creation_input_tokens": usage.cache_write,
        "cache_read_input_tokens": usage.cache_read,
        "output_tokens": usage.output,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }
    if usage.cache_write:
        told["cache_creation"] = {
            "ephemeral_5m_input_tokens": usage.cache_write - usage.cache_write_1h,
            "ephemeral_1h_input_tokens": usage.cache_write_1h,
        }
    return told
