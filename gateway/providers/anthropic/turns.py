"""Translates chat messages to the system prompt and the messages of Anthropic's Messages API.

`conversation` separates the two. Each chat message becomes a list of blocks: thinking, content parts, tool calls, or a
tool result. Thinking is sent only with its signature (`thinking_blocks`), because the server rejects unsigned thinking.
Errors name the path of the field, for example `messages[2].content[0].type`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.providers.chat_request import (
    SYSTEM_ROLES,
    ChatMessage,
    Media,
    Part,
    ThinkingBlock,
    ToolCall,
    called_function,
    read_arguments,
    read_file,
    read_media,
    text_of,
)
from gateway.providers.translation import NOTHING, UnsupportedField, is_given

Block = dict[str, Any]

BREAKPOINT = msgspec.Raw(b'{"type":"ephemeral"}')  # the value of `cache_control`
PDF = "application/pdf"
THINKING_TYPES = ("thinking", "redacted_thinking")
_NOT_IN_IDS = re.compile(r"[^a-zA-Z0-9_-]")  # a tool call's id may come from a server that allows more characters


def with_breakpoint(block: Block, given: msgspec.Raw) -> Block:
    """Return the block with the client's cache breakpoint for it, if there is one."""
    if is_given(given):
        block["cache_control"] = given
    return block


def conversation(messages: Sequence[ChatMessage]) -> tuple[list[Block], list[Block]]:
    """Return the blocks of the system prompt, and the messages. Adjacent messages of the same role are joined.

    Only system messages at the beginning become the system prompt. A later system message is not moved, because
    moving it would change the prefix of every message after it. Raises `UnsupportedField`.
    """
    system: list[Block] = []
    turns: list[Block] = []
    for number, message in enumerate(messages):
        role, blocks = _role_and_blocks(message, f"messages[{number}]")
        if not blocks:  # the text is empty, which the Messages API rejects
            continue
        if role == "system" and not turns:
            system += blocks
        elif turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    return system, turns


def _role_and_blocks(message: ChatMessage, where: str) -> tuple[str, list[Block]]:
    if message.role == "tool":
        return "user", [_tool_result(message, where)]
    blocks = _content(message.content, f"{where}.content", _PARTS if message.role == "user" else _TEXT_PARTS)
    if message.role == "assistant":
        role, blocks = "assistant", _answer(message, blocks, where)
    elif message.role in SYSTEM_ROLES:
        role = "system"
    elif message.role == "user":
        role = "user"
    else:
        raise UnsupportedField(f"the role {message.role!r} is not supported", f"{where}.role")
    if blocks and blocks[-1]["type"] not in THINKING_TYPES:
        with_breakpoint(blocks[-1], message.cache_control)
    return role, blocks


def _answer(message: ChatMessage, blocks: list[Block], where: str) -> list[Block]:
    """Return the blocks of an assistant's message. The Messages API requires thinking to come first."""
    thinking = [block for each in message.thinking_blocks or () if (block := _thinking_block(each))]
    refusal = [_text_block(message.refusal)] if message.refusal else []
    calls = [_tool_use(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(message.tool_calls or ())]
    return [*thinking, *blocks, *refusal, *calls]


def _thinking_block(thinking: ThinkingBlock) -> Block | None:
    """Translate a thinking block. Returns None if the block has no signature."""
    if thinking.type == "redacted_thinking" and thinking.data:
        return {"type": "redacted_thinking", "data": thinking.data}
    if thinking.type == "thinking" and thinking.signature:
        return {"type": "thinking", "thinking": thinking.thinking, "signature": thinking.signature}
    return None


def _tool_use(call: ToolCall, where: str) -> Block:
    function = called_function(call, where)
    block: Block = {
        "type": "tool_use",
        "id": _NOT_IN_IDS.sub("_", call.id),
        "name": function.name,
        "input": read_arguments(function, where),
    }
    return with_breakpoint(block, call.cache_control)


def _tool_result(message: ChatMessage, where: str) -> Block:
    if message.tool_call_id is None:
        raise UnsupportedField("is required in a tool's message", f"{where}.tool_call_id")
    block: Block = {"type": "tool_result", "tool_use_id": _NOT_IN_IDS.sub("_", message.tool_call_id)}
    content = _content(message.content, f"{where}.content", _PARTS)
    if content:
        last = content[-1].pop("cache_control", NOTHING)  # a breakpoint of the last part moves to the tool result
        block["content"] = content
        with_breakpoint(block, last)
    return with_breakpoint(block, message.cache_control)


def _content(content: str | list[Part] | None, where: str, known: _Parts) -> list[Block]:
    if not content:
        return []
    if isinstance(content, str):
        return [_text_block(content)]
    blocks = []
    for number, part in enumerate(content):
        part_path = f"{where}[{number}]"
        if part.type not in known:
            raise UnsupportedField(
                f"parts of type {part.type!r} are not supported here by this model's server", f"{part_path}.type"
            )
        if (block := known[part.type](part, part_path)) is not None:
            of_openai = BREAKPOINT if is_given(part.prompt_cache_breakpoint) else NOTHING  # OpenAI's breakpoint
            blocks.append(with_breakpoint(block, part.cache_control or of_openai))
    return blocks


def _text_block(text: str) -> Block:
    return {"type": "text", "text": text}


def _text_part(part: Part, where: str) -> Block | None:
    return _text_block(part.text) if part.text else None


def _refusal_part(part: Part, where: str) -> Block | None:
    return _text_block(part.refusal) if part.refusal else None


def _image_part(part: Part, where: str) -> Block:
    if part.image_url is None:
        raise UnsupportedField("is required", f"{where}.image_url")
    return {"type": "image", "source": _source(part.image_url.url, f"{where}.image_url.url")}


def _file_part(part: Part, where: str) -> Block:
    """Return a document, or an image. The API takes PDFs and plain text, and no other files."""
    media = read_file(part, where)
    path = f"{where}.file.file_data"
    if (media.media_type or "").startswith("image/"):
        return {"type": "image", "source": _source_of(media)}
    if (text := text_of(media, path)) is not None:
        source: Block = {"type": "text", "media_type": "text/plain", "data": text}
    elif media.media_type in (None, PDF):
        source = _source_of(media)
    else:
        raise UnsupportedField(f"must be a PDF, an image or text, not {media.media_type}", path)
    block: Block = {"type": "document", "source": source}
    if part.file is not None and part.file.filename:
        block["title"] = part.file.filename
    return block


def _source(url: str, where: str) -> Block:
    return _source_of(read_media(url, where))


def _source_of(media: Media) -> Block:
    if media.data is not None:
        return {"type": "base64", "media_type": media.media_type, "data": media.data}
    return {"type": "url", "url": media.url}


_Parts = Mapping[str, Callable[[Part, str], Block | None]]
_TEXT_PARTS: _Parts = {"text": _text_part, "refusal": _refusal_part}
_PARTS: _Parts = {"text": _text_part, "image_url": _image_part, "file": _file_part}
