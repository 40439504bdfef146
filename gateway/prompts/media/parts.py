"""Recognises images, sound, video and files in the content parts of chat messages.

The forms are OpenAI's (`image_url`, `input_audio`, `file`), those that vLLM and SGLang add (`audio_url`, `video_url`),
and Qwen's (`image`, `audio`, `video`). Other endpoints translate their parts to these forms before. A part that has
none of them is text.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

import msgspec
import xxhash

from gateway.core.errors import BadRequest
from gateway.prompts.media.encoded import ITEMS_MAX, EncodedFile, HeaderBudget, split_data_url
from gateway.prompts.media.images import image_size
from gateway.prompts.media.pdf import pdf_pages
from gateway.prompts.media.recordings import recording_seconds

PCM16_BYTES_PER_SECOND = 48_000  # OpenAI's raw sound: 24,000 samples of 16 bits
_TEXT_TYPES = (b"text/", b"application/json", b"application/xml", b"application/x-yaml")
_ABSENT = msgspec.Raw()


class MediaKind(enum.StrEnum):
    """What a part is, which decides how it is counted."""

    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"
    FILE = "file"
    TEXT_FILE = "text_file"  # a file whose bytes are text


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """One image, sound, video or file of a prompt. A size of 0 is unknown, as for everything given by URL or id."""

    kind: MediaKind
    digest: bytes  # of its bytes, or of its URL or id; 16 bytes
    width: int = 0  # pixels
    height: int = 0
    detail: str = ""  # of an image, as the client set it
    seconds: float = 0.0
    pages: int = 0
    size_bytes: int = 0
    name: bytes = b""  # of a file, which models read

    @property
    def has_size(self) -> bool:
        """Whether the size that determines its tokens is known."""
        return bool(self.width or self.seconds or self.pages or self.kind is MediaKind.TEXT_FILE)


class _Source(msgspec.Struct):
    """Where the media is: a URL, data, or the id of an uploaded file."""

    url: msgspec.Raw = _ABSENT
    data: msgspec.Raw = _ABSENT
    file_data: msgspec.Raw = _ABSENT
    file_id: str | None = None
    file_url: str | None = None
    filename: str | None = None
    format: str | None = None
    detail: str | None = None


_Given = _Source | str | list[msgspec.Raw] | None  # an object, the URL itself, or the frames of a video


class _Part(msgspec.Struct):
    """The fields of a content part in which media may be."""

    type: str = ""
    image_url: _Given = None
    input_audio: _Given = None
    audio_url: _Given = None
    video_url: _Given = None
    file: _Given = None
    image: _Given = None
    audio: _Given = None
    video: _Given = None


_part = msgspec.json.Decoder(_Part).decode
_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.encode


def media_item(part: msgspec.Raw, budget: HeaderBudget) -> MediaItem | None:
    """The media in a content part. None if the part has none, or is malformed: then the deployment judges it.

    The cost is one pass over the part, and a header's few bytes. Media of the same bytes have the same digest, whether
    they came in a data URL or as plain base64. Raises `BadRequest` if the prompt has more than `ITEMS_MAX` media.
    """
    try:
        fields = _part(part)
        if fields.type == "text":
            return None
        for name, make in _MAKERS.items():
            given: _Given = getattr(fields, name)
            if given is not None:
                source = given if isinstance(given, _Source) else _Source(url=msgspec.Raw(_encode(given)))
                budget.items -= 1
                if budget.items < 0:
                    raise BadRequest(
                        f"messages: must have at most {ITEMS_MAX} images, recordings and files", param="messages"
                    )
                return make(source, budget)
    except (msgspec.MsgspecError, RecursionError):
        pass
    return None


def _image(source: _Source, budget: HeaderBudget) -> MediaItem:
    content = _Content(source.url, budget)
    size = image_size(content.file) if content.file is not None else None
    width, height = size or (0, 0)
    detail = (source.detail or "")[:16]
    return MediaItem(
        kind=MediaKind.IMAGE, digest=content.digest(), width=width, height=height, detail=detail,
        size_bytes=content.size_bytes,
    )  # fmt: skip


def _audio(source: _Source, budget: HeaderBudget) -> MediaItem:
    return _recording(MediaKind.AUDIO, source, budget)


def _video(source: _Source, budget: HeaderBudget) -> MediaItem:
    return _recording(MediaKind.VIDEO, source, budget)


def _recording(kind: MediaKind, source: _Source, budget: HeaderBudget) -> MediaItem:
    content = _Content(
        source.url if source.data is _ABSENT else source.data, budget, is_data=source.data is not _ABSENT
    )
    seconds = recording_seconds(content.file) if content.file is not None else 0.0
    if source.format == "pcm16":
        seconds = content.size_bytes / PCM16_BYTES_PER_SECOND
    return MediaItem(kind=kind, digest=content.digest(), seconds=seconds, size_bytes=content.size_bytes)


def _file(source: _Source, budget: HeaderBudget) -> MediaItem:
    name = (source.filename or "").encode("utf-8", "surrogatepass")
    if source.file_data is _ABSENT:
        return MediaItem(
            kind=MediaKind.FILE,
            digest=xxhash.xxh3_128_digest((source.file_url or source.file_id or "").encode()),
            name=name,
        )
    content = _Content(source.file_data, budget, is_data=True)
    digest, size_bytes = content.digest(), content.size_bytes
    if content.media_type.startswith(_TEXT_TYPES):
        return MediaItem(kind=MediaKind.TEXT_FILE, digest=digest, size_bytes=size_bytes, name=name)
    if content.file is not None and (size := image_size(content.file)) is not None:
        return MediaItem(
            kind=MediaKind.IMAGE, digest=digest, width=size[0], height=size[1], size_bytes=size_bytes, name=name
        )
    pages = pdf_pages(content.file) if content.file is not None else 0
    return MediaItem(kind=MediaKind.FILE, digest=digest, pages=pages, size_bytes=size_bytes, name=name)


_MAKERS: Mapping[str, Callable[[_Source, HeaderBudget], MediaItem]] = {
    "image_url": _image,
    "input_audio": _audio,
    "audio_url": _audio,
    "video_url": _video,
    "file": _file,
    "image": _image,
    "audio": _audio,
    "video": _video,
}


class _Content:
    """The content of a part: a file in base64, or a URL, whose content is unknown."""

    def __init__(self, value: msgspec.Raw, budget: HeaderBudget, *, is_data: bool = False) -> None:
        """`value` is JSON, usually a string. With `is_data`, a string that is no data URL is plain base64."""
        written = _unquoted(value)
        data = split_data_url(written)
        self.media_type = data[0] if data is not None else b""
        self._identity = data[1] if data is not None else written
        self.file = EncodedFile(self._identity, budget) if data is not None or (is_data and len(written)) else None
        self.size_bytes = 0 if self.file is None else self.file.size

    def digest(self) -> bytes:
        """The digest of the base64 payload, or of the URL."""
        return xxhash.xxh3_128_digest(self._identity)


def _unquoted(value: msgspec.Raw) -> memoryview:
    """The text of a JSON string. Any other JSON, such as a list of frames, is returned unchanged."""
    written = bytes(value)
    if written[:1] == b'"' and written.find(b"\\") < 0:
        return memoryview(written)[1:-1]
    return memoryview(_text(written).encode("utf-8", "surrogatepass") if written[:1] == b'"' else written)
