"""Bounds the number of parts of an image file that a decoder reads one after the other.

A part may have a few bytes and cost much more time than its bytes: each scan of a progressive JPEG goes through the
whole image again, and Pillow reads segments, chunks and comments in Python, with its lock. Files of cameras and editors
have some dozens of them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

MAX_SCANS = 64  # of a JPEG; progressive ones have about ten
MAX_PARTS = 20_000  # of a file: segments of a JPEG, chunks of a PNG (some kilobytes of pixels each), blocks of a GIF

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_GIF = (b"GIF87a", b"GIF89a")
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")  # those with content, and the end
_SCAN, _END = 0xDA, 0xD9
_LENGTH = struct.Struct(">H")
_CHUNK_LENGTH = struct.Struct(">I")


def excess(data: bytes) -> str | None:
    """What the file has too much of, in words that follow "has". None if decoders can read it in bounded time."""
    parts: Iterator[int] = iter(())
    if data.startswith(_JPEG):
        parts = _jpeg_markers(data)
    elif data.startswith(_PNG):
        parts = _png_chunks(data)
    elif data.startswith(_GIF):
        parts = _gif_blocks(data)
    num_scans = 0
    for number, kind in enumerate(parts, 1):
        num_scans += kind == _SCAN
        if num_scans > MAX_SCANS:
            return f"more than {MAX_SCANS} scans"
        if number > MAX_PARTS:
            return f"more than {MAX_PARTS:,} parts"
    return None


def _jpeg_markers(data: bytes) -> Iterator[int]:
    """The markers of segments and scans. Whatever stands between them is skipped, as libjpeg does."""
    at = 2
    while found := _MARKER.search(data, at):
        at = found.end()
        marker = data[at - 1]
        if marker == _END:
            return
        yield marker
        if at + _LENGTH.size <= len(data):
            at += max(_LENGTH.size, _LENGTH.unpack_from(data, at)[0])


def _png_chunks(data: bytes) -> Iterator[int]:
    at = len(_PNG)
    while at + 12 <= len(data):
        yield 0
        at += 12 + int(_CHUNK_LENGTH.unpack_from(data, at)[0])


def _gif_blocks(data: bytes) -> Iterator[int]:
    """The blocks of extensions before the first picture, whose own blocks are not read in Python."""
    at = 13 + (3 << (data[10] & 7) + 1 if data[10:11] and data[10] & 0x80 else 0)
    while (kind := data[at : at + 1]) and kind not in (b",", b";"):
        if kind != b"!":  # Pillow skips what it does not know, byte by byte
            yield 0
            at += 1
            continue
        at += 2
        while size := data[at] if at < len(data) else 0:
            yield 0
            at += 1 + size
        at += 1
        yield 0
