"""Measures the text of a stream from its bytes, without parsing most of them.

The first `SAMPLE_BYTES` are kept. They are parsed only if their text is needed: if the call ends without counts, and
now and then to learn how many tokens a deployment counts for text. The text of the bytes after the sample is assumed to
have the same share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from gateway.billing.reply_events import decode_event, generated_text
from gateway.providers.sse import UNREADABLE, is_done

SAMPLE_BYTES = 16 * 1024
_BLANK_LINE = re.compile(rb"\n\r?\n")  # ends a frame; JSON strings escape newlines, so no frame contains one


class ReceivedText:
    """The text of one stream. `received` counts the bytes of all its frames."""

    __slots__ = ("_measured", "_sample", "_sampled", "_text_bytes", "received")

    def __init__(self) -> None:
        self.received = 0
        self._sample: list[bytes] = []
        self._sampled = 0  # bytes in the sample
        self._measured = 0  # chunks of the sample whose text is in `_text_bytes`
        self._text_bytes = 0

    def add(self, frames: bytes) -> None:
        """Add one or more complete frames."""
        count = len(frames)
        self.received += count
        if self._sampled < SAMPLE_BYTES:
            self._sample.append(frames)
            self._sampled += count

    @property
    def is_whole(self) -> bool:
        """Whether the sample contains all frames."""
        return self.received == self._sampled

    @property
    def sample(self) -> str:
        """The text of the sample."""
        return "".join(text for chunk in self._sample for text in _texts(chunk))

    def text_bytes(self, frame_bytes: int | None = None) -> int:
        """The bytes (UTF-8) of text in all frames, or in so many bytes of frames. Exact for the whole sample."""
        for chunk in self._sample[self._measured :]:
            self._text_bytes += sum(len(text.encode(errors="replace")) for text in _texts(chunk))
        self._measured = len(self._sample)
        wanted = self.received if frame_bytes is None else frame_bytes
        if wanted == self._sampled:
            return self._text_bytes
        return math.ceil(self._text_bytes * wanted / self._sampled) if self._sampled else 0


def split_frames(chunk: bytes) -> Iterator[bytes]:
    """Split a chunk into its event frames. Each includes the blank line after it, so joining them gives the chunk."""
    start = 0
    for blank_line in _BLANK_LINE.finditer(chunk):
        yield chunk[start : blank_line.end()]
        start = blank_line.end()
    if start < len(chunk):
        yield chunk[start:]


def data_of(frame: bytes) -> bytes:
    """Return the data of a frame: its `data:` lines without their names. Empty for a comment."""
    return b"\n".join(line[5:].strip() for line in frame.splitlines() if line.startswith(b"data:"))


def _texts(chunk: bytes) -> Iterator[str]:
    """The generated text in the frames of a chunk. A frame that cannot be read counts whole, since it may be text."""
    for frame in split_frames(chunk):
        data = data_of(frame)
        if not data or is_done(data):
            continue
        try:
            choices = decode_event(data).choices or []
        except UNREADABLE:
            yield data.decode(errors="replace")
            continue
        for choice in choices:
            yield from generated_text(choice)
