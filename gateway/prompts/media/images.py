"""Reads the width and height of PNG, JPEG, GIF, WebP and BMP images from their headers.

The functions get hostile files. They read a bounded number of bytes and return None for anything malformed.
"""

from __future__ import annotations

import struct

from gateway.prompts.media.encoded import EncodedFile

SEGMENTS_MAX = 100  # of a JPEG, before its frame header; photos have some twenty
_PNG = b"\x89PNG\r\n\x1a\n"
_NO_FRAMES = {0xC4, 0xC8, 0xCC}  # markers among those of JPEG frames that are none

Size = tuple[int, int]


def image_size(file: EncodedFile) -> Size | None:
    """Width and height in pixels, each at least 1. None if the format is unknown or the header is malformed."""
    head = file.read(0, 32)
    try:
        size = _size(file, head)
    except (struct.error, IndexError):  # truncated
        return None
    return size if size is not None and min(size) > 0 else None


def _size(file: EncodedFile, head: bytes) -> Size | None:
    if head.startswith(_PNG):
        return struct.unpack_from(">II", head, 16)
    if head.startswith(b"\xff\xd8"):
        return _jpeg_size(file)
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return struct.unpack_from("<HH", head, 6)
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return _webp_size(head)
    if head.startswith(b"BM"):
        width, height = struct.unpack_from("<ii", head, 18)
        return width, abs(height)  # negative: the rows are stored from top to bottom
    return None


def _jpeg_size(file: EncodedFile) -> Size | None:
    """Skip from segment to segment, by their lengths, until the frame header."""
    at = 2
    for _ in range(SEGMENTS_MAX):
        segment = file.read(at, 10)
        if segment[0] != 0xFF:
            return None
        marker = segment[1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker not in _NO_FRAMES:
            height, width = struct.unpack_from(">HH", segment, 5)
            return width, height
        elif marker in (0xD8, 0xD9, 0xDA):  # the image data begins, or the image ends
            return None
        else:
            at += 2 + struct.unpack_from(">H", segment, 2)[0]
    return None


def _webp_size(head: bytes) -> Size | None:
    match head[12:16]:
        case b"VP8 ":  # lossy; 14 bits each, the upper two are a scale
            width, height = struct.unpack_from("<HH", head, 26)
            return width & 0x3FFF, height & 0x3FFF
        case b"VP8L":  # lossless; 14 bits each, less one
            bits = struct.unpack_from("<I", head, 21)[0]
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8X":  # extended; 24 bits each, less one
            return int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
    return None
