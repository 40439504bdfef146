"""Server-sent events: splitting into frames, ends, errors and malformed events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.providers.sse import (
    MAX_FRAME_BYTES,
    FrameSplitter,
    FrameTooLong,
    ends_stream,
    find_error,
    first_malformed_at,
    is_single_object_event,
)

_pieces = st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b"a", b"data: x", b"\n\n", b"\r\n\r\n", b""]))


def test_a_read_that_ends_with_a_frame_is_passed_on_without_a_copy() -> None:
    data = b"data: 1\n\ndata: 2\n\n"
    assert FrameSplitter(MAX_FRAME_BYTES).feed(data) is data


@given(_pieces)
def test_splitting_keeps_all_bytes_in_order(pieces: list[bytes]) -> None:
    splitter = FrameSplitter(MAX_FRAME_BYTES)
    frames = [splitter.feed(piece) for piece in pieces]
    assert b"".join(frames) + splitter.rest == b"".join(pieces)
    assert all(frame.endswith((b"\n\n", b"\n\r\n", b"\r\r")) for frame in frames if frame)


@given(st.lists(st.binary(min_size=1).filter(lambda b: not set(b) & set(b"\r\n")), min_size=1), st.integers(1, 9))
def test_every_frame_is_returned_by_the_read_that_completes_it(lines: list[bytes], size: int) -> None:
    stream = b"".join(b"data: " + line + b"\n\n" for line in lines)
    splitter = FrameSplitter(MAX_FRAME_BYTES)
    returned_bytes = 0
    for i in range(0, len(stream), size):
        returned_bytes += len(splitter.feed(stream[i : i + size]))
        assert returned_bytes == stream.rfind(b"\n\n", 0, i + size) + 2 or b"\n\n" not in stream[: i + size]


def test_the_size_of_a_frame_is_bounded() -> None:
    splitter = FrameSplitter(max_frame_bytes=10)
    assert splitter.feed(b"data: 1\n\n" * 9) == b"data: 1\n\n" * 9
    assert splitter.feed(b"x" * 10) == b""
    with pytest.raises(FrameTooLong, match="10 bytes"):
        splitter.feed(b"x")


@pytest.mark.parametrize(
    ("frames", "ends"),
    [
        (b"data: [DONE]\n\n", True),
        (b"data:[DONE]\r\n\r\n", True),
        (b"data: 1\n\ndata: [DONE]\n\n", True),
        (b"data: [DONE]", True),
        (b'data: {"content": "data: [DONE]"}\n\n', False),
        (b"data: {}\n\n", False),
        (b": data: [DONE]\n\n", False),
        (b"", False),
    ],
)
def test_ends_stream(frames: bytes, ends: bool) -> None:
    assert ends_stream(frames) is ends


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        (b'data: {"error": {"message": "no memory"}}\n\n', (0, {"message": "no memory"})),
        (b'data: {}\r\n\r\ndata: {"error": "no"}\r\n\r\n', (12, "no")),
        (b'data: {"error": {"code": 7}}\n\n', (0, {"code": 7})),
        (b'data: {"error"\n\n', (0, "unreadable")),
        (b'data: {"error": null}\n\n', None),
        (b'data: {"content": "data: {\\"error\\": 1}"}\n\n', None),
        (b"data: 1\n\n", None),
        (b'data: {"choices": [{"finish_reason": "error"}], "error": {"message": "m"}}\n\n', (0, {"message": "m"})),
        (b'event: error\ndata: {"a": 1, "error": "m"}\n\n', (13, "m")),
        (
            b'data: {"object": "error", "message": "m", "code": 5}\n\n',
            (0, {"message": "m", "type": None, "param": None, "code": 5}),
        ),
        (b'data: {"choices": [{"filter": {"error": {"message": "m"}}}]}\n\n', None),
        (b'data: {"choices": [{"delta": {"content": "\\"error\\": 1"}}], "error": null}\n\n', None),
    ],
)
def test_find_error(frames: bytes, error: tuple[int, Any] | None) -> None:
    assert find_error(frames) == error


@pytest.mark.parametrize(
    ("frames", "one"),
    [
        (b'data: {"choices": [{"delta": {"content": "[DONE]"}}]}\n\n', True),
        (b"data: {}\n\n", True),
        (b"data: {}\r\n\r\n", False),
        (b"data: {}\n\ndata: {}\n\n", False),
        (b'data: {"a":\ndata: 1}\n\n', False),
        (b'data: {"a"\n\n', False),
        (b"data: {} x\n\n", False),
        (b'data: {"a":\r1}\n\n', False),
        (b'data: {"error": null}\n\n', False),
        (b'data: {"choices": [], "error": {"message": "m"}}\n\n', False),
        (b"data: [DONE]\n\n", False),
        (b": here\n\n", False),
        (b"", False),
    ],
)
def test_is_single_object_event(frames: bytes, one: bool) -> None:
    assert is_single_object_event(frames) is one


_PARTS = [b"data: ", b'{"a":1}', b'{"error":"x"}', b"[DONE]", b"{", b"}", b'"a":', b"1", b"\n", b"\r", b"\n\n", b" "]


@given(st.lists(st.sampled_from(_PARTS), max_size=8))
def test_a_single_object_event_is_well_formed_and_neither_an_error_nor_the_end(parts: list[bytes]) -> None:
    frames = b"".join([b'data: {"a":', *parts, b"\n\n"])
    if is_single_object_event(frames):
        assert first_malformed_at(frames) is None and find_error(frames) is None and not ends_stream(frames)
