"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gateway.doors.base import Asked, Choices, Common, Fields, TokenCount, decode
from gateway.errors import BadRequest
from gateway.types import Operation


class Message(msgspec.Struct):
    role: str
    content: str | list[msgspec.Raw] | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()
    name: str | None = None
    tool_call_id: str | None = None


class ChatBody(Common, kw_only=True):
    messages: list[Message]
    tools: list[msgspec.Raw] | None = None
    n: Choices | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None


_decoder = msgspec.json.Decoder(ChatBody)
_message = msgspec.json.Decoder(Message)


class ChatDoor:
    operation: ClassVar[Operation] = Operation.CHAT

    def read(self, fields: Fields, body: bytes) -> Asked:
        chat = decode(_decoder, body)
        if not chat.messages:
            raise BadRequest("messages: at least one message is needed", param="messages")
        pieces: list[bytes] = [bytes(tool) for tool in chat.tools or ()]
        plain = True
        for message in chat.messages:
            calls = bytes(message.tool_calls)
            plain = plain and not calls and type(message.content) is str
            pieces.append(_piece(message, calls))
        return Asked(
            common=chat,
            fields=fields,
            pieces=tuple(pieces),
            max_output_tokens=chat.max_completion_tokens or chat.max_tokens,
            choices=chat.n or 1,
            deterministic=chat.temperature == 0 or chat.seed is not None,
            messages=chat.messages,
            piece_of=_read_piece,
            plain=plain,
            tools=len(chat.tools or ()),
        )


def _piece(message: Message, calls: bytes) -> bytes:
    """A message as a template would lay it out: who speaks, what is said, which tools are called."""
    if isinstance(message.content, str):
        said = message.content.encode("utf-8", "surrogatepass")
    else:
        said = b"".join(map(bytes, message.content or ()))
    return b"\x02%b\x03%b%b" % (message.role.encode(), said, calls)


def _read_piece(message: bytes) -> bytes:
    told = _message.decode(message)
    return _piece(told, bytes(told.tool_calls))
