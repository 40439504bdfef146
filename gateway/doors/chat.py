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


class ChatDoor:
    operation: ClassVar[Operation] = Operation.CHAT

    def read(self, fields: Fields, body: bytes) -> Asked:
        chat = decode(_decoder, body)
        if not chat.messages:
            raise BadRequest("messages: at least one message is needed", param="messages")
        pieces: list[bytes] = [bytes(tool) for tool in chat.tools or ()]
        for message in chat.messages:
            pieces += _pieces(message)
        return Asked(
            common=chat,
            fields=fields,
            pieces=tuple(pieces),
            max_output_tokens=chat.max_completion_tokens or chat.max_tokens,
            choices=chat.n or 1,
            deterministic=chat.temperature == 0 or chat.seed is not None,
            messages=chat.messages,
            tools=len(chat.tools or ()),
        )


def _pieces(message: Message) -> list[bytes]:
    """A message as a template would lay it out: who speaks, what is said, which tools are called."""
    pieces = [b"\x02", message.role.encode(), b"\x03"]
    if isinstance(message.content, str):
        pieces.append(message.content.encode("utf-8", "surrogatepass"))
    elif message.content:
        pieces += [bytes(part) for part in message.content]
    pieces.append(bytes(message.tool_calls))
    return pieces
