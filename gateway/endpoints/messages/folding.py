"""Folds the events of a streamed message into the message's content, as Anthropic's clients do."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.providers.sse import UNREADABLE, event_data

Json = dict[str, Any]

# The field of a delta that is a piece of a block's field, by the delta's type. Pieces of `partial_json` make `input`.
_ADDED = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
UNREADABLE_EVENT = (*UNREADABLE, AttributeError, LookupError, TypeError)


class _Message(msgspec.Struct):
    id: str
    content: list[dict[str, msgspec.Raw]]
    stop_reason: str | None = None


_message = msgspec.json.Decoder(_Message).decode
_event = msgspec.json.Decoder(dict[str, Any]).decode
_arguments = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class FoldedMessage:
    """A message, complete or as its events arrive. `is_readable` is False after events that cannot be folded."""

    def __init__(self, max_bytes: int) -> None:
        """A message of more than `max_bytes` counts as unreadable, and is not kept."""
        self.id = ""
        self.stop_reason: str | None = None
        self.content: list[Json] = []
        self.is_readable = True
        self._max_bytes = max_bytes
        self._bytes = 0
        self._pieces: dict[int, dict[str, list[str]]] = {}  # of open blocks, by index and field

    def read_message(self, body: bytes) -> None:
        """Read a complete message."""
        if self._has_room(body):
            try:
                message = _message(body)
                self.id, self.content, self.stop_reason = message.id, [*message.content], message.stop_reason
            except UNREADABLE_EVENT:
                self._give_up()

    def read(self, frames: bytes) -> None:
        """Read complete frames of a stream."""
        if not self._has_room(frames):
            return
        try:
            for data in event_data(frames):
                if data:
                    self._add(_event(data))
        except UNREADABLE_EVENT:
            self._give_up()

    @property
    def is_complete(self) -> bool:
        """Whether the message has an id, a stop reason, and blocks that are all complete objects."""
        return (
            self.is_readable
            and not self._pieces
            and isinstance(self.id, str)
            and isinstance(self.stop_reason, str)
            and all(isinstance(block, dict) for block in self.content)
        )

    def _has_room(self, received: bytes) -> bool:
        self._bytes += len(received)
        if self._bytes > self._max_bytes:
            self._give_up()
        return self.is_readable

    def _give_up(self) -> None:
        self.is_readable = False
        self.content = []
        self._pieces.clear()

    def _add(self, event: Json) -> None:
        match event["type"]:
            case "message_start":
                self.id = event["message"]["id"]
                self.content = [*event["message"]["content"]]
            case "content_block_start":
                if event["index"] != len(self.content):
                    raise LookupError("a block is missing")
                self.content.append(event["content_block"])
                self._pieces[event["index"]] = {}
            case "content_block_delta":
                self._add_delta(event["index"], event["delta"])
            case "content_block_stop":
                self._end_block(event["index"])
            case "message_delta":
                self.stop_reason = event["delta"]["stop_reason"]

    def _add_delta(self, index: int, delta: Json) -> None:
        kind, pieces, block = delta["type"], self._pieces[index], self.content[index]
        if kind in _ADDED:
            pieces.setdefault(_ADDED[kind], []).append(delta[_ADDED[kind]])
        elif kind == "signature_delta":
            block["signature"] = delta["signature"]
        elif kind == "citations_delta":
            block["citations"] = [*(block.get("citations") or ()), delta["citation"]]
        else:
            raise LookupError(f"an unknown delta {kind!r}")

    def _end_block(self, index: int) -> None:
        block = self.content[index]
        for field, pieces in self._pieces.pop(index).items():
            if field == "partial_json":
                arguments = "".join(pieces) or "{}"
                _arguments(arguments)
                block["input"] = msgspec.Raw(arguments.encode())
            else:
                block[field] = (block.get(field) or "") + "".join(pieces)
