"""Decides whether a fetched body is what its part says: an image, a recording or a file."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gateway.providers.media_fetch.parts import AUDIO, FILE, IMAGE, VIDEO

# The beginnings of the media types that each part may have.
ACCEPTED: Mapping[str, tuple[str, ...]] = {
    IMAGE: ("image/",),
    AUDIO: ("audio/",),
    VIDEO: ("video/",),
    FILE: (
        "application/pdf", "text/", "image/", "audio/", "video/", "application/json", "application/xml",
        "application/x-yaml", "application/msword", "application/vnd.",
    ),
}  # fmt: skip
_TYPE = re.compile(r"[a-z0-9.+-]+/[a-z0-9.+-]+")
_UNKNOWN = ("", "application/octet-stream", "binary/octet-stream")  # as object stores say it
# (offset, bytes, media type)
_MAGIC = (
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"GIF8", "image/gif"),
    (8, b"WEBP", "image/webp"),
    (8, b"WAVE", "audio/wav"),
    (0, b"ID3", "audio/mpeg"),
    (0, b"\xff\xfb", "audio/mpeg"),
    (0, b"%PDF-", "application/pdf"),
    (4, b"ftyp", "video/mp4"),
)


def media_type_of(kind: str, content_type: str, body: bytes) -> str | None:
    """Return the media type of a body for a part of this kind. None if the part cannot have this type.

    `content_type` is the header's value. If it says nothing, the first bytes tell.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type in _UNKNOWN:
        media_type = next((name for at, magic, name in _MAGIC if body.startswith(magic, at)), "")
    fits = _TYPE.fullmatch(media_type) is not None and media_type.startswith(ACCEPTED[kind])
    return media_type if fits else None
