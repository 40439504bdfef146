"""Complete answers of chats and completions: their texts, and the same answers with other texts."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.core.errors import HookFailed
from gateway.providers.base import Sink
from gateway.providers.sse import data_of, ends_stream, is_done, split_frames
from gateway.routing.upstream import Upstream
from gateway.types import Call

ANSWER_BYTES_MAX = 16 * 1024 * 1024  # of an answer that is held back

_object = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.encode


class HeldAnswer:
    """A complete answer. `texts` has the text of each choice, in the order of their indices."""

    def __init__(self, content: bytes, *, stream: bool) -> None:
        """`content` is the JSON of an answer, or all frames of a stream. Malformed frames have no text."""
        self.content = content  # as it arrived
        self._stream = stream
        self._parts = [*_parts_of(content, stream=stream)]
        self._texts: dict[int, str] = {}
        self._changed = False
        self.is_readable = True  # whether all content is text, and not a list of parts
        for part in self._parts:
            for choice in _choices(part):
                index, (_, text) = _index(choice), _text(choice)
                self.is_readable = self.is_readable and not _has_parts(choice)
                self._texts[index] = self._texts.get(index, "") + text

    @property
    def texts(self) -> list[str]:
        """The texts by choice."""
        return [self._texts[index] for index in sorted(self._texts)]

    def replace(self, texts: list[str]) -> None:
        """Replace the text of each choice."""
        self._texts = dict(zip(sorted(self._texts), texts, strict=True))
        self._changed = True

    def encoded(self) -> bytes:
        """The answer's bytes: those that arrived, if no text was replaced.

        Otherwise a choice's text is in its first event with text, and the later events have none.
        """
        if not self._changed:
            return self.content
        left = dict(self._texts)
        for part in self._parts:
            for choice in _choices(part):
                where, text = _text(choice)
                if where is not None and (text or _index(choice) in left):
                    where[0][where[1]] = left.pop(_index(choice), "")
                choice.pop("logprobs", None)  # of the tokens that are replaced
        if not self._stream:
            return _encode(self._parts[0])
        events = [b"data: %b\n\n" % (part if isinstance(part, bytes) else _encode(part)) for part in self._parts]
        return b"".join(events)


class HookedUpstream:
    """An upstream whose answer has arrived, and is given as one chunk. Everything else is the upstream's own."""

    def __init__(self, upstream: Upstream, content: bytes) -> None:
        self._upstream = upstream
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._upstream, name)

    async def first(self) -> bytes:
        """The whole answer."""
        return self._content

    async def stream_to(self, sink: Sink, _: object = None) -> bool:
        """There are no further chunks."""
        return True


async def held_answer(call: Call, upstream: Upstream) -> HeldAnswer:
    """Read an answer to its end. Raises `UpstreamCut`, and `HookFailed` if the answer is too long."""
    chunks = [await upstream.first()]
    size_bytes = len(chunks[0])

    def take(chunk: bytes) -> bool:
        nonlocal size_bytes
        chunks.append(chunk)
        size_bytes += len(chunk)
        return size_bytes <= ANSWER_BYTES_MAX and not ends_stream(chunk)

    if call.stream and not ends_stream(chunks[0]):
        await upstream.stream_to(take)
    if size_bytes > ANSWER_BYTES_MAX:
        raise HookFailed(f"the answer is longer than {ANSWER_BYTES_MAX:,} bytes, so no hook can check it")
    return HeldAnswer(b"".join(chunks), stream=call.stream)


def _parts_of(content: bytes, *, stream: bool) -> list[Any]:
    """The JSON objects of an answer. Events without an object, as `[DONE]`, stay bytes."""
    if not stream:
        return [_object(content)]
    parts: list[Any] = []
    for frame in split_frames(content):
        if data := data_of(frame):
            try:
                parts.append(data if is_done(data) else _object(data))
            except msgspec.MsgspecError:
                parts.append(data)
    return parts


def _choices(part: Any) -> list[dict[str, Any]]:
    found = part.get("choices") if isinstance(part, dict) else None
    return [choice for choice in found if isinstance(choice, dict)] if isinstance(found, list) else []


def _index(choice: dict[str, Any]) -> int:
    index = choice.get("index")
    return index if isinstance(index, int) else 0


def _has_parts(choice: dict[str, Any]) -> bool:
    """Whether the content is a list of parts, such as Mistral's thinking."""
    holders = [choice.get(name) for name in ("message", "delta")]
    return any(isinstance(holder, dict) and isinstance(holder.get("content"), list) for holder in holders)


def _text(choice: dict[str, Any]) -> tuple[tuple[dict[str, Any], str] | None, str]:
    """Where the text of a choice is: an object and a name. With the text, which may be empty."""
    for name in ("message", "delta"):
        if isinstance(holder := choice.get(name), dict):
            text = holder.get("content")
            return ((holder, "content"), text) if isinstance(text, str) else (None, "")
    text = choice.get("text")
    return ((choice, "text"), text) if isinstance(text, str) else (None, "")
