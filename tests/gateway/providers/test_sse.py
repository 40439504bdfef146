"""Server-sent events: splitting into frames, ends, errors and malformed events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.providers.sse import (
    DONE,
    MAX_FRAME_BYTES,
    CheckedFrames,
    FrameSplitter,
    FrameTooLong,
    are_object_events,
    check_frames,
    data_of,
    ends_stream,
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


OBJECT, USUAL = b'{"a": 1}', b'data: {"a": 1}\n\n'


@pytest.mark.parametrize(
    ("frames", "chunk"),
    [
        (USUAL, USUAL),
        (USUAL * 3, USUAL * 3),
        (b": ping\n\n" + USUAL, b": ping\n\n" + USUAL),
        (b"event: x\nid: 7\n" + USUAL, b"event: x\nid: 7\n" + USUAL),
        (b'data:{"a": 1}\n\n', USUAL),
        (b'data: {"a": 1}\r\n\r\n', USUAL),
        (b'data: {"a": 1}\r\r', USUAL),
        (b'id: 7\r\ndata: {"a": 1}\r\n\r\n: ping\r\n\r\n', b"id: 7\n" + USUAL + b": ping\n\n"),
        (b'data: {"a":\ndata: 1}\n\n', USUAL),
        (b'data: {"a":\r\ndata: 1}\r\nid: 7\r\n\r\n', b"id: 7\n" + USUAL),
        (b'data: {"a":\rdata: 1}\r\r' * 2, USUAL * 2),
        (b'data: {"a": 1}', USUAL),  # the stream ended without the last blank line
        (b'data: {"content": "data: [DONE]"}\n\n', b'data: {"content": "data: [DONE]"}\n\n'),
        (b": data: [DONE]\n\n", b": data: [DONE]\n\n"),
        ('data: {"a": "é"}\n\n'.encode(), 'data: {"a": "é"}\n\n'.encode()),
        (b"", b""),
    ],
)
def test_frames_are_brought_into_the_usual_form(frames: bytes, chunk: bytes) -> None:
    checked = check_frames(frames)
    assert checked == CheckedFrames(chunk)
    assert check_frames(chunk) == checked  # which is stable


@pytest.mark.parametrize(
    "end",
    [
        b"data: [DONE]\n\n",
        b"data:[DONE]\r\n\r\n",
        b"data:  [DONE]\n\n",
        b"data: [DONE] \n\n",
        b"data: [DONE]\nid: 9\n\n",
        b"event: done\ndata: [DONE]\n\n",
        b"data: [DONE]",
        b"data: [DONE]\n\n: ping\n\n" + USUAL,  # what follows the end is dropped
    ],
)
def test_the_end_of_a_stream_however_it_is_written(end: bytes) -> None:
    assert check_frames(USUAL + end) == CheckedFrames(USUAL + DONE, ended=True)
    assert ends_stream(USUAL + DONE) and not ends_stream(USUAL)


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        (b'data: {"error": {"message": "no memory"}}\n\n', {"message": "no memory"}),
        (b'data: {"error": {"message":\r\ndata: "no memory"}}\r\n\r\n', {"message": "no memory"}),
        (b'data: {"error": {"code": 7}}\n\n', {"code": 7}),
        (b'data: {"choices": [{"finish_reason": "error"}], "error": {"message": "m"}}\n\n', {"message": "m"}),
        (b'event: error\ndata: {"a": 1, "error": "m"}\n\n', "m"),
        (
            b'data: {"object": "error", "message": "m", "code": 5}\n\n',
            {"message": "m", "type": None, "param": None, "code": 5},
        ),
    ],
)
def test_an_error_ends_the_frames_that_pass(frames: bytes, error: Any) -> None:
    assert check_frames(USUAL + frames + USUAL) == CheckedFrames(USUAL, error=error)


@pytest.mark.parametrize(
    "frames",
    [
        b'data: {"error": null}\n\n',
        b'data: {"content": "data: {\\"error\\": 1}"}\n\n',
        b'data: {"choices": [{"filter": {"error": {"message": "m"}}}]}\n\n',
        b'data: {"choices": [{"delta": {"content": "\\"error\\": 1"}}], "error": null}\n\n',
    ],
)
def test_the_word_error_is_no_error(frames: bytes) -> None:
    assert check_frames(frames) == CheckedFrames(frames)


@pytest.mark.parametrize("data", [b"1", b"[]", b'{"a"', b'{"error"', b"{} x", b"[DONE] x", b"null", b"[" * 10_000])
def test_what_is_no_object_ends_the_frames_that_pass(data: bytes) -> None:
    assert check_frames(USUAL + b"data: %b\n\n" % data + USUAL) == CheckedFrames(USUAL, malformed=True)


@pytest.mark.parametrize("data", [b'{"a": "\xff"}', b'{"a": "\xed\xa0\x80"}', b'{"\xc3": 1}'])
def test_what_is_not_utf8_does_not_pass(data: bytes) -> None:
    frame = b"data: %b\n\n" % data
    assert check_frames(USUAL + frame).malformed
    assert not are_object_events(frame)


@pytest.mark.parametrize(
    ("frames", "usual"),
    [
        (b'data: {"choices": [{"delta": {"content": "[DONE]"}}]}\n\n', True),
        (b"data: {}\n\n", True),
        (b"data: {}\r\n\r\n", False),
        (b"data: {}\n\ndata: {}\n\n", True),
        (b'data: {"a": 1}\n\n' * 5, True),
        (b'data: {"a": 1}\n\ndata: {"b"}\n\n', False),
        (b"data: {}\n\ndata: [DONE]\n\n", False),
        (b"data: {}\n\n\ndata: {}\n\n", False),
        (b"data: {}\n\n: comment\n\n", False),
        (b"data: {},{}\n\ndata: {}\n\n", False),
        (b'data: {"a":\n\ndata: {}}\n\n', False),
        (b'data: {"a":"\n\ndata: {"}\n\ndata: {}],[{}\n\n', False),  # as many objects as events
        (b'data: {"a":\n1\n}],[{}\n\ndata: {}\n\n', False),
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
def test_are_object_events(frames: bytes, usual: bool) -> None:
    assert are_object_events(frames) is usual


_PARTS = [
    b"data: ", b'{"a":1}', b'{"error":"x"}', b"[DONE]", b"{", b"}", b'"a":', b"1", b"\n", b"\r", b"\n\n", b" ",
    b"\n\ndata: {", b'"', b"],[", b"]\t,[{", b"\t", b"}\n\n",
]  # fmt: skip


@given(st.lists(st.sampled_from(_PARTS), max_size=8))
def test_object_events_are_well_formed_and_neither_an_error_nor_the_end(parts: list[bytes]) -> None:
    frames = b"".join([b'data: {"a":', *parts, b"\n\n"])
    if are_object_events(frames):
        assert check_frames(frames) == CheckedFrames(frames)
        assert check_frames(frames + DONE) == CheckedFrames(frames + DONE, ended=True)


@given(st.lists(st.sampled_from([*_PARTS, b'data: {"a":1}\n\n', DONE]), max_size=8))
def test_the_fast_check_finds_the_same_end_as_the_slow_one(parts: list[bytes]) -> None:
    """A comment in front keeps the fast check away."""
    frames = b"".join([*parts, DONE])
    slow = check_frames(b": comment\n\n" + frames)
    assert check_frames(frames) == replace(slow, chunk=slow.chunk.removeprefix(b": comment\n\n"))


@pytest.mark.parametrize(
    ("frame", "data"),
    [
        (b"data: x\n\n", b"x"),
        (b"data:x \n\n", b"x"),
        (b"data: x\ry\n\n", b"x"),  # a CR ends the line, too
        (b"data: x\r\n\r\n", b"x"),
        (b"data: x\ndata: y\n\n", b"x\ny"),
        (b"event: e\ndata: x\n\n", b"x"),
        (b": ping\n\n", b""),
        (b"data: x", b"x"),
    ],
)
def test_the_data_of_a_frame(frame: bytes, data: bytes) -> None:
    assert data_of(frame) == data
