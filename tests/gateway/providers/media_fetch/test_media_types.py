from __future__ import annotations

import pytest

from gateway.providers.media_fetch.media_types import media_type_of
from gateway.providers.media_fetch.parts import AUDIO, FILE, IMAGE, VIDEO

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("kind", "content_type", "body", "found"),
    [
        (IMAGE, "image/png", b"", "image/png"),
        (IMAGE, "Image/PNG; charset=binary", b"", "image/png"),
        (IMAGE, "text/html", PNG, None),
        (IMAGE, "image/png,image/x", PNG, None),
        (IMAGE, "application/octet-stream", PNG, "image/png"),
        (IMAGE, "", b"\xff\xd8\xff\xe0", "image/jpeg"),
        (IMAGE, "", b"RIFF\x00\x00\x00\x00WEBPVP8 ", "image/webp"),
        (IMAGE, "", b"<html>", None),
        (IMAGE, "binary/octet-stream", b"%PDF-1.7", None),
        (FILE, "binary/octet-stream", b"%PDF-1.7", "application/pdf"),
        (FILE, "text/plain", b"hi", "text/plain"),
        (FILE, "application/x-msdownload", b"MZ", None),
        (AUDIO, "audio/wav", b"", "audio/wav"),
        (AUDIO, "video/mp4", b"", None),
        (VIDEO, "", b"\x00\x00\x00\x18ftypmp42", "video/mp4"),
    ],
)
def test_a_body_has_a_type_that_its_part_may_have(kind: str, content_type: str, body: bytes, found: str | None) -> None:
    assert media_type_of(kind, content_type, body) == found
