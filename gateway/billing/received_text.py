"""Measures the text of a stream from its bytes, without parsing most of them.

The first `SAMPLE_BYTES` are kept. They are parsed only if their text is needed: if the call ends without counts, and
now and then to learn how many tokens a deployment counts for text. The text of the bytes after the sample is assumed to
have the same share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from gateway.billing.reply_events import decode_choices, decode_event, generated_text
from gateway.providers.sse import UNREADABLE, data_of, is_done, join_objects, split_frames

SAMPLE_BYTES = 16 * 1024


class ReceivedText:
    """The text of one stream. `events` counts its frames with data, and `received` the bytes of all its frames."""

    __slots__ = ("_measured", "_sampled", "_text_bytes", "_texts", "events", "received", "sample", "sample_max")

    def __init__(self, texts: Callable[[bytes], Iterable[str]] | None = None) -> None:
        """`texts` yields the generated text in frames. Default: in those of chats and completions."""
        self._texts = _texts if texts is None else texts
        self.events = 0
        self.received = 0
        self.sample: list[bytes] = []  # the first chunks, as long as fewer than `sample_max` bytes are received
        self.sample_max = SAMPLE_BYTES
        self._sampled = 0  # bytes of the sample whose text is in `_text_bytes`
        self._measured = 0  # chunks of the sample whose text is in `_text_bytes`
        self._text_bytes = 0

    def add(self, frames: bytes, events: int) -> int:
        """Add complete frames, of which so many have data. Returns the bytes received so far."""
        before, self.events = self.received, self.events + events
        if before < SAMPLE_BYTES:
            self.sample.append(frames)
        self.received = received = before + len(frames)
        return received

    @property
    def is_whole(self) -> bool:
        """Whether the sample contains all frames."""
        return self.received == sum(map(len, self.sample))

    @property
    def sample_text(self) -> str:
        """The text of the sample."""
        return "".join(text for chunk in self.sample for text in self._texts(chunk))

    def text_bytes(self, frame_bytes: int | None = None) -> int:
        """The bytes (UTF-8) of text in all frames, or in so many bytes of frames. Exact for the whole sample."""
        if self._measured < len(self.sample):
            frames = b"".join(self.sample[self._measured :])
            self._sampled += len(frames)
            self._text_bytes += len("".join(self._texts(frames)).encode(errors="replace"))
            self._measured = len(self.sample)
        wanted = self.received if frame_bytes is None else frame_bytes
        if wanted == self._sampled:
            return self._text_bytes
        return math.ceil(self._text_bytes * wanted / self._sampled) if self._sampled else 0


def _texts(frames: bytes) -> Iterable[str]:
    """The generated text in frames. Nearly all are chunks in the usual form, which are decoded together."""
    arrays = join_objects(frames)
    if arrays is None:
        return _texts_one_by_one(frames)
    try:
        choices = decode_choices(arrays)
    except UNREADABLE:
        return _texts_one_by_one(frames)
    texts: list[str] = []
    for choice in choices:
        texts += generated_text(choice)
    return texts


def _texts_one_by_one(frames: bytes) -> Iterator[str]:
    """A frame that cannot be read counts whole, since it may be text."""
    for frame in split_frames(frames):
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
