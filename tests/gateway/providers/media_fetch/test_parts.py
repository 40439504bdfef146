from __future__ import annotations

import json
from typing import Any

import msgspec

from gateway.providers.media_fetch.parts import ALL_PARTS, FILE, IMAGE, remote_media, with_data

URL = "https://example.com/folder/a%20b.pdf?x=1"


def part(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, kind: fields}


def raw(*messages: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps([*messages]).encode())


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def test_urls_are_found_with_the_paths_of_their_fields() -> None:
    image, file = part("image_url", url=URL), part("file", file_url=URL)
    messages = raw({"role": "system", "content": "be brief"}, user({"type": "text", "text": URL}, image), user(file))
    found = remote_media(messages, ALL_PARTS)
    assert [(medium.param, medium.url) for medium in found] == [
        ("messages[1].content[1].image_url.url", URL),
        ("messages[2].content[0].file.file_url", URL),
    ]
    assert [medium.kind for medium in remote_media(messages, frozenset({FILE}))] == [FILE]


def test_data_and_malformed_parts_are_left_alone() -> None:
    data = part("image_url", url="data:image/png;base64,AAAA")
    assert remote_media(raw(user(data, part("image_url", url=7), part("image_url"))), ALL_PARTS) == []
    assert remote_media(raw(user({"type": "image_url", "image_url": URL})), ALL_PARTS) == []
    assert remote_media(raw("no message"), ALL_PARTS) == remote_media(msgspec.Raw(b"7"), ALL_PARTS) == []


def test_data_stands_where_the_url_stood_and_other_fields_stay() -> None:
    messages = raw(
        user(part("image_url", url=URL, detail="low"), part("file", file_url=URL)),
        {"role": "assistant", "content": "x", "n": 1.00},
        user(part("file", file_url=URL, filename="mine.pdf"), {"type": "text", "text": "\u00fc"}),
    )
    media = remote_media(messages, frozenset({IMAGE, FILE}))
    changed = json.loads(bytes(with_data(messages, media, ["data:1", "data:2", "data:3"])))
    assert changed[0]["content"] == [
        part("image_url", url="data:1", detail="low"),
        part("file", filename="a b.pdf", file_data="data:2"),
    ]
    assert changed[1] == {"role": "assistant", "content": "x", "n": 1.0}
    assert changed[2]["content"] == [
        part("file", filename="mine.pdf", file_data="data:3"),
        {"type": "text", "text": "ü"},
    ]
