"""POST /v1/chat/completions: OpenAI's chat API. Endpoints with other API formats translate their requests to it.

Minimal path 3 of 7. Next: ../limits/requests.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from gateway.core.cache_breakpoints import part_text, tool_calls_without_breakpoints, without_breakpoint
from gateway.core.errors import BadRequest
from gateway.endpoints.base import NativeEndpoint
from gateway.prompts.media.counting import Piece
from gateway.prompts.media.encoded import HeaderBudget
from gateway.prompts.media.parts import MediaItem, media_item
from gateway.prompts.reader import Choices, CommonFields, Fields, ParsedBody, TokenCount, decode
from gateway.types import Operation

_NO_CALLS = msgspec.Raw()


class ChatMessage(msgspec.Struct):
    """The fields of a message that make up the prompt. All other fields pass to the deployment unread."""

    role: str
    content: str | list[msgspec.Raw] | None = None
    tool_calls: msgspec.Raw = _NO_CALLS
    name: str | None = None
    tool_call_id: str | None = None


class ChatBody(CommonFields, kw_only=True):
    """The fields of a chat request that the gateway acts on."""

    messages: list[ChatMessage]
    tools: list[msgspec.Raw] | None = None
    n: Choices | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None


_decoder = msgspec.json.Decoder(ChatBody)
_message = msgspec.json.Decoder(ChatMessage)


class ChatEndpoint(NativeEndpoint):
    """POST /v1/chat/completions."""

    path: ClassVar[str] = Operation.CHAT.value
    operation: ClassVar[Operation] = Operation.CHAT

    def read(self, fields: Fields, body: bytes) -> ParsedBody:
        return read_chat(fields, body)


def read_chat(fields: Fields, body: bytes) -> ParsedBody:
    """Check and read a chat body. Raises `BadRequest`. Endpoints that translate to chat also call this function."""
    chat = decode(_decoder, body)
    if not chat.messages:
        raise BadRequest("messages: must have at least one message", param="messages")
    pieces: list[Piece] = [without_breakpoint(bytes(tool)) for tool in chat.tools or ()]
    plain = True
    budget = HeaderBudget()
    for message in chat.messages:
        piece, is_plain = _piece(message, budget)
        pieces.append(piece)
        plain = plain and is_plain
    return ParsedBody(
        common=chat,
        fields=fields,
        pieces=tuple(pieces),
        max_output_tokens=chat.max_completion_tokens or chat.max_tokens,
        choices=chat.n or 1,
        deterministic=chat.temperature == 0 or chat.seed is not None,
        messages=chat.messages,
        piece_of=_piece_of_json,
        reread=read_chat,
        plain=plain,
        tools=len(chat.tools or ()),
    )


def _piece(message: ChatMessage, budget: HeaderBudget) -> tuple[Piece, bool]:
    """Return a message's text and media in the order of a chat template: role, content, tool calls.

    Also returns whether the piece is free of JSON as the client wrote it. Cache breakpoints are removed, because
    deployments do not show them to the model. Control bytes enclose the role, so no message content can be mistaken for
    a role.
    """
    content, calls = message.content, message.tool_calls
    if isinstance(content, str) and calls is _NO_CALLS:  # the usual case
        text_bytes = content.encode() if content.isascii() else _encoded(content)
        return b"".join((b"\x02", message.role.encode(), b"\x03", text_bytes)), True
    role = b"\x02%b\x03" % message.role.encode()
    call_bytes = b"" if calls is _NO_CALLS else tool_calls_without_breakpoints(bytes(calls))
    if not isinstance(content, list):
        text_bytes = b"" if content is None else _encoded(content)
        return b"".join((role, text_bytes, call_bytes)), False
    if len(content) == 1 and (text := part_text(content[0])) is not None:
        # Chat templates produce the same prompt from both forms.
        return b"".join((role, _encoded(text), call_bytes)), False
    items = [media_item(part, budget) for part in content]
    if any(items):
        return _media_piece(role, content, items, call_bytes)
    return b"".join((role, *(without_breakpoint(bytes(part)) for part in content), call_bytes)), False


def _media_piece(
    role: bytes, content: Sequence[msgspec.Raw], items: Sequence[MediaItem | None], call_bytes: bytes
) -> tuple[Piece, bool]:
    parts: list[bytes | MediaItem] = [role]
    plain = not call_bytes
    for part, item in zip(content, items, strict=True):
        if item is not None:
            parts.append(item)
        elif (text := part_text(part)) is not None:
            parts.append(_encoded(text))
        else:
            parts.append(without_breakpoint(bytes(part)))
            plain = False
    return (*parts, call_bytes), plain


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _piece_of_json(message: bytes) -> Piece:
    return _piece(_message.decode(message), HeaderBudget())[0]
