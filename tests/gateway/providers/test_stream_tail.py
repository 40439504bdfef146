"""Whether a stream without an end marker is complete."""

from __future__ import annotations

import sys

import pytest

from gateway.providers.stream_tail import CHUNK_MAX_BYTES, CHUNKS_MAX, StreamTail
from tests.gateway.calls import a_call, chat

TEXT = b'data: {"choices": [{"index": 0, "delta": {"content": "word"}}]}'
END = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}'


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("frames", [1, 1000])
def test_the_end_is_found_in_chunks_of_any_size(frames: int, line_end: bytes) -> None:
    tail = StreamTail(a_call(chat(stream=True)))
    blank_line = 2 * line_end
    tail.add((TEXT + blank_line) * frames)
    assert not tail.is_complete()
    tail.add((TEXT + blank_line) * frames + END + blank_line)
    assert tail.is_complete()


def test_little_is_kept_of_large_chunks() -> None:
    """A client that reads slowly gets its answer in large chunks."""
    tail = StreamTail(a_call(chat(stream=True)))
    for _ in range(100):
        tail.add((TEXT + b"\n\n") * 1000)
    kept = sum(sys.getsizeof(chunk) for chunk in tail._chunks)
    assert kept < CHUNKS_MAX * (CHUNK_MAX_BYTES + 100)
