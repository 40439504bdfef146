"""Reads a body in another API format that cannot be translated to a chat, as far as the phases need.

Only deployments that have the client's API get such a body. Routing, limits and metering need the model, the bound on
output, and the prompt as text and media. Parts that the gateway does not know count as the JSON that they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from gateway.core.cache_breakpoints import part_text, without_breakpoint
from gateway.core.errors import BadRequest
from gateway.core.native_requests import MESSAGES, OUTPUT_LIMITS, NativeRequest
from gateway.prompts.media.counting import Piece
from gateway.prompts.media.encoded import HeaderBudget
from gateway.prompts.media.parts import MediaItem, media_item
from gateway.prompts.reader import CommonFields, Fields, Name, ParsedBody, TokenCount

_Content = str | list[msgspec.Raw] | None


class _Common(msgspec.Struct):
    """The fields of both APIs that the phases act on."""

    model: str
    max_tokens: TokenCount | None = None
    max_output_tokens: TokenCount | None = None
    stream: bool | None = None
    temperature: float | None = None
    metadata: dict[str, Any] | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: str | None = None
    service_tier: Name | None = None
    tools: list[msgspec.Raw] | None = None
    system: _Content = None  # Messages
    messages: list[msgspec.Raw] | None = None
    instructions: str | None = None  # Responses
    input: _Content = None


class _Message(msgspec.Struct):
    role: str = ""
    content: _Content = None


class _Source(msgspec.Struct):
    """Where an image or a document of a message is. `file` has no data."""

    type: str = ""
    media_type: str = ""
    data: msgspec.Raw = msgspec.Raw()
    url: str | None = None


class _Part(msgspec.Struct):
    """A part of content in which media or further parts may be."""

    type: str = ""
    source: _Source | None = None  # Messages
    content: _Content = None
    image_url: str | None = None  # Responses
    detail: str | None = None
    file_data: msgspec.Raw = msgspec.Raw()
    file_url: str | None = None
    file_id: str | None = None
    filename: str | None = None


_common = msgspec.json.Decoder(_Common).decode
_message = msgspec.json.Decoder(_Message).decode
_part = msgspec.json.Decoder(_Part).decode
_encode = msgspec.json.encode
MAX_DEPTH = 8  # of content in content


def read_untranslated(api: str, fields: Fields, body: bytes, refusal: BadRequest) -> ParsedBody:
    """Read a body for deployments that have the API. Raises `refusal` if the fields that are read are invalid."""
    try:
        common = _common(body)
        pieces, tools = _pieces(common), len(common.tools or ())
    except (msgspec.MsgspecError, RecursionError):
        raise refusal from None
    limit = common.max_tokens if OUTPUT_LIMITS[api] == "max_tokens" else common.max_output_tokens
    end_user = common.safety_identifier or common.user
    if api == MESSAGES and common.metadata is not None and isinstance(named := common.metadata.get("user_id"), str):
        end_user = named
    return ParsedBody(
        common=CommonFields(
            model=common.model,
            user=end_user,
            prompt_cache_key=common.prompt_cache_key,
            service_tier=common.service_tier,
            metadata=common.metadata,
            temperature=common.temperature,
            stream=common.stream,
        ),
        fields=fields,
        pieces=tuple(pieces),
        max_output_tokens=limit,
        deterministic=common.temperature == 0,
        tools=tools,
        native=NativeRequest(api, fields, refusal),
    )


def _pieces(common: _Common) -> list[Piece]:
    budget = HeaderBudget()
    pieces: list[Piece] = [without_breakpoint(bytes(tool)) for tool in common.tools or ()]
    for role, content in (("system", common.system), ("system", common.instructions)):
        if content:
            pieces.append(_piece(role, content, budget))
    if isinstance(common.input, str):
        pieces.append(_piece("user", common.input, budget))
    for given in (common.messages or (), common.input if isinstance(common.input, list) else ()):
        for item in given:
            message = _message(item)
            if message.content is None:  # a call, a result, or another item of the Responses API
                pieces.append(bytes(item))
            else:
                pieces.append(_piece(message.role, message.content, budget))
    return pieces


def _piece(role: str, content: str | list[msgspec.Raw], budget: HeaderBudget) -> Piece:
    """A message as text, or as text and media. Control bytes enclose the role, as in a chat's pieces."""
    parts: list[bytes | MediaItem] = [b"\x02%b\x03" % role.encode(), *_parts(content, budget)]
    texts = [part for part in parts if isinstance(part, bytes)]
    return b"".join(texts) if len(texts) == len(parts) else tuple(parts)


def _parts(content: str | Sequence[msgspec.Raw], budget: HeaderBudget, depth: int = 0) -> Iterator[bytes | MediaItem]:
    if isinstance(content, str):
        yield content.encode("utf-8", "surrogatepass")
        return
    for raw in content:
        if (text := part_text(raw)) is not None:
            yield text.encode("utf-8", "surrogatepass")
            continue
        try:
            part = _part(raw)
        except msgspec.ValidationError:
            yield without_breakpoint(bytes(raw))
            continue
        if (form := _chat_form(part)) is not None and (item := media_item(msgspec.Raw(_encode(form)), budget)):
            yield item
        elif isinstance(part.content, list) and depth < MAX_DEPTH:
            yield from _parts(part.content, budget, depth + 1)
        else:
            yield without_breakpoint(bytes(raw))


def _chat_form(part: _Part) -> dict[str, Any] | None:
    """An image or a file as a part of a chat, whose media are recognised. None for other parts."""
    source = part.source
    if source is not None and source.type in ("base64", "url"):
        given: Any = source.url
        if source.type == "base64":
            given = msgspec.Raw(b'"data:%b;base64,' % source.media_type.encode() + bytes(source.data)[1:])
        is_image = part.type == "image"
        return {"image_url": {"url": given}} if is_image else {"file": {"file_data": given, "filename": ""}}
    if part.image_url is not None:
        return {"image_url": {"url": part.image_url, "detail": part.detail or "auto"}}
    if bytes(part.file_data):
        return {"file": {"file_data": part.file_data, "filename": part.filename or ""}}
    named = part.file_url or part.file_id
    return {"file": {"file_id": named, "filename": part.filename or ""}} if named is not None else None
