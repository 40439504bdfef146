"""Small files for tests of media: some as real encoders wrote them, others built field by field."""

from __future__ import annotations

import base64
import io
import struct
import wave
import zlib
from pathlib import Path
from typing import Any

# Written by Pillow 13.
IMAGES = {file.name: file.read_bytes() for file in sorted((Path(__file__).parent / "images").iterdir())}
IMAGES_SIZE = (37, 21)


def png(width: int, height: int, tail: bytes = b"") -> bytes:
    """The header of a PNG, and any bytes behind it."""
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBB", 13, b"IHDR", width, height, 8, 2, 0, 0, 0) + b"crc " + tail


def wav(seconds: float, rate: int = 8_000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(b"\0\0" * int(seconds * rate))
    return file.getvalue()


def mp3(seconds: float, *, id3_bytes: int = 0, count: bool = False) -> bytes:
    """Frames of MPEG 1 layer III with 128 kbit/s at 44.1 kHz. With `count`, the first one has the number of frames."""
    frames = round(seconds * 44_100 / 1_152)
    header = b"\xff\xfb\x90\x00"
    first = header + bytes(32) + b"Xing" + struct.pack(">II", 1, frames) if count else header
    length = 144 * 128_000 // 44_100
    tag = b"ID3\x04\x00\x00" + bytes(id3_bytes >> shift & 127 for shift in (21, 14, 7, 0)) + bytes(id3_bytes)
    audio = first.ljust(length, b"\0") + (b"" if count else (header.ljust(length, b"\0")) * (frames - 1))
    return (tag if id3_bytes else b"") + audio


def flac(seconds: float, rate: int = 48_000) -> bytes:
    packed = rate << 44 | 1 << 41 | 15 << 36 | int(seconds * rate)
    return b"fLaC" + b"\x80\0\0\x22" + bytes(10) + packed.to_bytes(8, "big") + bytes(16)


def mp4(seconds: float, *, version: int = 0, moov_last: bool = False) -> bytes:
    times = struct.pack(">QQIQ", 0, 0, 1_000, int(seconds * 1_000)) if version else struct.pack(
        ">IIII", 0, 0, 1_000, int(seconds * 1_000)
    )  # fmt: skip
    mvhd = _box(b"mvhd", bytes([version, 0, 0, 0]) + times + bytes(80))
    moov, data = _box(b"moov", mvhd), _box(b"mdat", bytes(5_000))
    return _box(b"ftyp", b"isom0000") + (data + moov if moov_last else moov + data)


def _box(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", 8 + len(content)) + name + content


def pdf(pages: int, *, compressed: bool = False, filler: int = 0) -> bytes:
    """A PDF with a page tree and an outline, whose objects are in an object stream if `compressed`."""
    kids = b" ".join(b"%d 0 R" % (10 + i) for i in range(pages))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R /Outlines 3 0 R >>",
        b"<< /Type /Pages /Kids [%b] /Count %d >>" % (kids, pages),
        b"<< /Type /Outlines /First 4 0 R /Count 77 >>",
        *(b"<</Type/Page/Parent 2 0 R>>" for _ in range(pages)),
    ]
    stream = b"9 0 obj\n<< /Length %d >>\nstream\n%b\nendstream\nendobj\n" % (filler, bytes(filler))
    if not compressed:
        body = b"".join(b"%d 0 obj\n%b\nendobj\n" % (i, content) for i, content in enumerate(objects, 1))
        return b"%PDF-1.4\n" + stream + body + b"trailer << /Root 1 0 R >>\n%%EOF\n"
    packed = zlib.compress(b"1 0 2 50 " + b" ".join(objects))
    head = b"8 0 obj\n<< /Type /ObjStm /N 3 /First 9 /Length %d >>\nstream\r\n" % len(packed)
    return b"%PDF-1.5\n" + stream + head + packed + b"\nendstream\nendobj\n%%EOF\n"


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def image_part(content: bytes | str, **fields: Any) -> dict[str, Any]:
    """A content part with an image, given as bytes or by URL."""
    url = content if isinstance(content, str) else data_url(content)
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def file_part(content: bytes) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": data_url(content, "application/pdf")}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
