"""A chat's messages as the turns of Anthropic's Messages, and what stands before them as the system prompt.

Thinking is sent back only where it came signed (`thinking_blocks`): without its signature the server would refuse it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.providers.anthropic.fields import UnsupportedField

Block = dict[str, Any]

NOTHING = msgspec.Raw()
BREAKPOINT = msgspec.Raw(b'{"type":"ephemeral"}')
THOUGHTS = ("thinking", "redacted_thinking")
_SYSTEM_ROLES = ("system", "developer")
_DATA_URL = re.compile(r"data:([\w.+/-]+);base64,(.*)", re.DOTALL)
_NO_ID = re.compile(r"[^a-zA-Z0-9_-]")  # of a tool call: other servers' ids may have more than Messages allow


class _ImageURL(msgspec.Struct):
    url: str


class _File(msgspec.Struct):
    file_data: str | None = None
    filename: str | None = None


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: _ImageURL | None = None
    file: _File | None = None
    cache_control: msgspec.Raw = NOTHING
    prompt_cache_breakpoint: msgspec.Raw = NOTHING


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str = ""


class _ToolCall(msgspec.Struct):
    id: str
    type: str = "function"
    function: _CalledFunction | None = None
    cache_control: msgspec.Raw = NOTHING


class _Thought(msgspec.Struct):
    type: str
    thinking: str = ""
    signature: str = ""
    data: str = ""


class Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    thinking_blocks: list[_Thought] | None = None
    function_call: msgspec.Raw = NOTHING
    audio: msgspec.Raw = NOTHING
    cache_control: msgspec.Raw = NOTHING


_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def is_given(value: msgspec.Raw) -> bool:
    return bytes(value) not in (b"", b"null")


def with_breakpoint(block: Block, given: msgspec.Raw) -> Block:
    if is_given(given):
        block["cache_control"] = given
    return block


def conversation(messages: Sequence[Message]) -> tuple[list[Block], list[Block]]:
    """The system prompt, and the turns: neighbours of one role are one. A later system message keeps its place, since
    in the system prompt it would change what every message stands behind.
    """
    system: list[Block] = []
    turns: list[Block] = []
    for number, message in enumerate(messages):
        role, blocks = _said(message, f"messages[{number}]")
        if not blocks:  # empty text, which Messages refuse
            continue
        if role == "system" and not turns:
            system += blocks
        elif turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    return system, turns


def _said(message: Message, where: str) -> tuple[str, list[Block]]:
    if message.role == "tool":
        return "user", [_tool_result(message, where)]
    blocks = _content(message.content, f"{where}.content", _PARTS if message.role == "user" else _TEXT_PARTS)
    if message.role == "assistant":
        role, blocks = "assistant", _answer(message, blocks, where)
    elif message.role in _SYSTEM_ROLES:
        role = "system"
    elif message.role == "user":
        role = "user"
    else:
        raise UnsupportedField(f"the role {message.role!r} is not known here", f"{where}.role")
    if blocks and blocks[-1]["type"] not in THOUGHTS:
        with_breakpoint(blocks[-1], message.cache_control)
    return role, blocks


def _answer(message: Message, blocks: list[Block], where: str) -> list[Block]:
    for name, value in (("function_call", message.function_call), ("audio", message.audio)):
        if is_given(value):
            raise UnsupportedField("can not be sent back to this server", f"{where}.{name}")
    thoughts = [block for thought in message.thinking_blocks or () if (block := _thought(thought))]
    refusal = [_text_block(message.refusal)] if message.refusal else []
    calls = [_tool_use(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(message.tool_calls or ())]
    return [*thoughts, *blocks, *refusal, *calls]


def _thought(thought: _Thought) -> Block | None:
    if thought.type == "redacted_thinking" and thought.data:
        return {"type": "redacted_thinking", "data": thought.data}
    if thought.type == "thinking" and thought.signature:
        return {"type": "thinking", "thinking": thought.thinking, "signature": thought.signature}
    return None


def _tool_use(call: _ToolCall, where: str) -> Block:
    if call.type != "function" or call.function is None:
        raise UnsupportedField(f"calls of the type {call.type!r} can not be sent to this server", f"{where}.type")
    arguments = call.function.arguments or "{}"
    try:
        _object(arguments)
    except (msgspec.MsgspecError, RecursionError):
        raise UnsupportedField("must be a JSON object", f"{where}.function.arguments") from None
    block: Block = {
        "type": "tool_use",
        "id": _NO_ID.sub("_", call.id),
        "name": call.function.name,
        "input": msgspec.Raw(arguments.encode()),  # as they are: every byte of the prompt decides what is cached
    }
    return with_breakpoint(block, call.cache_control)


def _tool_result(message: Message, where: str) -> Block:
    if message.tool_call_id is None:
        raise UnsupportedField("a tool's message names the call that it answers", f"{where}.tool_call_id")
    block: Block = {"type": "tool_result", "tool_use_id": _NO_ID.sub("_", message.tool_call_id)}
    content = _content(message.content, f"{where}.content", _PARTS)
    if content:
        last = content[-1].pop("cache_control", NOTHING)  # the breakpoint is the whole result's
        block["content"] = content
        with_breakpoint(block, last)
    return with_breakpoint(block, message.cache_control)


def _content(content: str | list[_Part] | None, where: str, known: _Parts) -> list[Block]:
    if not content:
        return []
    if isinstance(content, str):
        return [_text_block(content)]
    blocks = []
    for number, part in enumerate(content):
        place = f"{where}[{number}]"
        if part.type not in known:
            raise UnsupportedField(
                f"parts of the type {part.type!r} can not be sent to this server here", f"{place}.type"
            )
        if (block := known[part.type](part, place)) is not None:
            theirs = BREAKPOINT if is_given(part.prompt_cache_breakpoint) else NOTHING  # OpenAI's name for it
            blocks.append(with_breakpoint(block, part.cache_control or theirs))
    return blocks


def _text_block(text: str) -> Block:
    return {"type": "text", "text": text}


def _text_part(part: _Part, where: str) -> Block | None:
    return _text_block(part.text) if part.text else None


def _refusal_part(part: _Part, where: str) -> Block | None:
    return _text_block(part.refusal) if part.refusal else None


def _image_part(part: _Part, where: str) -> Block:
    if part.image_url is None:
        raise UnsupportedField("is missing", f"{where}.image_url")
    return {"type": "image", "source": _source(part.image_url.url, f"{where}.image_url.url")}


def _file_part(part: _Part, where: str) -> Block:
    if part.file is None or part.file.file_data is None:
        raise UnsupportedField("a file is sent to this server as its data", f"{where}.file.file_data")
    block: Block = {"type": "document", "source": _source(part.file.file_data, f"{where}.file.file_data")}
    if part.file.filename:
        block["title"] = part.file.filename
    return block


def _source(url: str, where: str) -> Block:
    if data := _DATA_URL.fullmatch(url):
        return {"type": "base64", "media_type": data[1], "data": data[2]}
    if url.startswith(("https://", "http://")):
        return {"type": "url", "url": url}
    raise UnsupportedField("is neither an http address nor data in base64", where)


_Parts = Mapping[str, Callable[[_Part, str], Block | None]]
_TEXT_PARTS: _Parts = {"text": _text_part, "refusal": _refusal_part}
_PARTS: _Parts = {"text": _text_part, "image_url": _image_part, "file": _file_part}
