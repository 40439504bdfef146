"""Finds media by URL in the messages of a chat, and replaces the URLs by data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

IMAGE, AUDIO, VIDEO, FILE = "image_url", "audio_url", "video_url", "file"
ALL_PARTS = frozenset({IMAGE, AUDIO, VIDEO, FILE})
FILE_NAME_MAX = 100  # characters of a name that is taken from a URL

_Fields = dict[str, msgspec.Raw]
_messages = msgspec.json.Decoder(list[_Fields]).decode
_parts = msgspec.json.Decoder(list[_Fields]).decode
_object = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.encode


class RemoteMedium(NamedTuple):
    """A medium by URL: the positions of its message and its part, the part's type, and the part's object."""

    message: int
    part: int
    kind: str
    fields: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The field that has the URL."""
        return "file_url" if self.kind == FILE else "url"

    @property
    def url(self) -> str:
        """The URL."""
        return str(self.fields[self.key])

    @property
    def param(self) -> str:
        """The path of the URL in the request, for errors."""
        return f"messages[{self.message}].content[{self.part}].{self.kind}.{self.key}"

    def with_data(self, data_url: str) -> dict[str, Any]:
        """Return the part's object with the data in the place of the URL."""
        if self.kind != FILE:
            return {**self.fields, "url": data_url}
        fields = {name: value for name, value in self.fields.items() if name != self.key}
        return {"filename": _name_of(self.url), **fields, "file_data": data_url}


def remote_media(messages: msgspec.Raw, kinds: Collection[str]) -> list[RemoteMedium]:
    """Return the media of these kinds that have an http(s) URL. Malformed messages have none: others reject them."""
    try:
        return [*_remote(_messages(messages), kinds)]
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return []


def _remote(messages: list[_Fields], kinds: Collection[str]) -> Iterator[RemoteMedium]:
    for number, message in enumerate(messages):
        content = message.get("content", msgspec.Raw())
        if not bytes(content).startswith(b"["):
            continue
        for position, part in enumerate(_parts(content)):
            for kind in part.keys() & kinds:
                fields = _object(part[kind]) if bytes(part[kind]).startswith(b"{") else {}
                medium = RemoteMedium(number, position, kind, fields)
                if isinstance(url := fields.get(medium.key), str) and url.startswith(("https://", "http://")):
                    yield medium


def with_data(messages: msgspec.Raw, media: Sequence[RemoteMedium], data_urls: Sequence[str]) -> msgspec.Raw:
    """Return the messages with the data of each medium in the place of its URL. All other bytes stay as they are."""
    decoded = _messages(messages)
    contents: dict[int, list[_Fields]] = {}
    for medium, data_url in zip(media, data_urls, strict=True):
        if medium.message not in contents:
            contents[medium.message] = _parts(decoded[medium.message]["content"])
        contents[medium.message][medium.part][medium.kind] = msgspec.Raw(_encode(medium.with_data(data_url)))
    for number, parts in contents.items():
        decoded[number]["content"] = msgspec.Raw(_encode(parts))
    return msgspec.Raw(_encode(decoded))


def _name_of(url: str) -> str:
    """The last part of a URL's path, as the name of a file."""
    return unquote(urlsplit(url).path).rpartition("/")[2][:FILE_NAME_MAX] or "file"
