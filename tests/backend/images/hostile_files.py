"""Image files that cost a decoder much time or memory, or that are damaged, and what is said about them."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import pytest

from tests.backend.vision_models import picture

pytest.importorskip("PIL", reason="the package pillow is not installed")
from PIL import Image

from backend.images import decoding


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png(width: int, height: int, rows: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def gif(width: int, height: int) -> bytes:
    """A picture on a screen of 10 x 10 pixels."""
    screen = b"GIF89a" + struct.pack("<HHBBB", 10, 10, 0x80, 0, 0) + bytes(6)
    return screen + b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\x00;"


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_with(chunks: bytes) -> bytes:
    return GOOD[:33] + chunks + GOOD[33:]  # after the header


def jpeg_with(segments: bytes) -> bytes:
    data = encoded(Image.fromarray(picture(90, 70)), "JPEG")
    return data[:2] + segments + data[2:]


def gif_with(blocks: bytes) -> bytes:
    data = encoded(Image.fromarray(picture(90, 70)), "GIF")
    start = 13 + 3 * (2 << (data[10] & 7))
    return data[:start] + blocks + data[start:]


def jpeg_of_scans(side: int, repeated: int) -> bytes:
    """A progressive JPEG whose last scan, of a few bytes, is repeated: each time, all coefficients are refined."""
    data = encoded(Image.new("L", (side, side), 128), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * repeated + data[-2:]


def exif_of(tags: int, values: int) -> bytes:
    """EXIF data that turns the image, with `tags` more of which each has all the same `values`, in two bytes each."""
    head = b"II*\0" + struct.pack("<IH", 8, tags + 1) + struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0)
    start = len(head) + 12 * tags + 4
    entries = b"".join(struct.pack("<HHII", 0x9000 + i, 3, values, start) for i in range(tags))
    return head + entries + bytes(4) + bytes(range(256)) * (values * 2 // 256)


GOOD = encoded(Image.fromarray(picture(90, 70)), "PNG")
HOSTILE = {
    "a bomb of pixels": (png(30_000, 30_000, bytes(1000)), "has more than 64,000,000 pixels"),
    "a smaller bomb": (png(9_000, 8_000, bytes(1000)), "has more than 64,000,000 pixels"),
    "a bomb in a frame": (gif(60_000, 60_000), "has more than 64,000,000 pixels"),
    "a larger bomb": (png(2**31 - 1, 2**31 - 1, b""), "pixels"),
    "thin": (png(1, 1000, bytes(4000)), "more than 200 times as long as wide"),
    "truncated": (GOOD[: len(GOOD) // 2], "is no image, or damaged"),
    "without pixels": (png(50, 50, b""), "is no image, or damaged"),
    "empty": (b"", "is no image, or damaged"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no image, or damaged"),
    "another format": (encoded(Image.fromarray(picture(60, 60)), "TIFF"), "the formats are PNG, JPEG"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "is no image"),
    "a long text": (png_with(chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**26)))), "is no image, or damaged"),
    "many texts": (png_with(chunk(b"tEXt", b"a\0b") * 30_000), "has more than 20,000 parts"),
    "many segments": (jpeg_with(b"\xff\xfe\0\2" * 30_000), "has more than 20,000 parts"),
    "many comments": (gif_with(b"!\xfe" + b"\1a" * 30_000 + b"\0"), "has more than 20,000 parts"),
    "many extensions": (gif_with(b"!\xfe\0" * 30_000), "has more than 20,000 parts"),
    "between extensions": (gif_with(b"?" * 30_000), "has more than 20,000 parts"),
    "many scans": (jpeg_of_scans(4_000, 100_000), "has more than 64 scans"),  # minutes of work
    "many scans behind others": (jpeg_with(jpeg_of_scans(500, 200)[2:]), "has more than 64 scans"),
    "too many bytes": (GOOD + bytes(decoding.MAX_BYTES), "has more than 20,971,520 bytes"),
}
