"""What messages are made of on Anthropic's wire, and the same in chat's words.

Both have turns of text, images, tool calls and their results, laid out otherwise: a turn of Anthropic's is a list of
blocks, where a result is a block of the user's turn and a call one of the assistant's. In chat each result is a message
of its own, and calls stand beside the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal

import msgspec

from gateway.core.cache_breakpoints import FIELD
from gateway.core.errors import BadRequest

ERROR_MARK = "Error: "  # before the text of a result with `is_error`, for which chat has no other place
FILE_NAME = "document"  # of a file without a title; chat wants one


class Breakpoint(msgspec.Struct, omit_defaults=True):
    """Up to where a prefix is to be cached, and for how long. What else is said of it (`scope`) is not known here, and
    is left out.
    """

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    cache_control: Breakpoint | None = None


class Text(Block, tag="text"):
    text: str
    citations: Any = None  # of an earlier answer; its text stands without them


class Base64Source(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="base64"):
    media_type: str
    data: str


class URLSource(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="url"):
    url: str


class Image(Block, tag="image"):
    source: Base64Source | URLSource


class PlainSource(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    data: str
    media_type: Literal["text/plain"] = "text/plain"


class NoCitations(msgspec.Struct, forbid_unknown_fields=True):
    enabled: Literal[False] = False


class Document(Block, tag="document"):
    """A file, such as a PDF, or a text."""

    source: Base64Source | PlainSource
    title: str | None = None
    citations: NoCitations | None = None


class Thinking(Block, tag="thinking"):
    thinking: str
    signature: str | None = None  # of a server of Anthropic's; no other signs


class RedactedThinking(Block, tag="redacted_thinking"):
    data: str  # that only its maker can read


class Direct(msgspec.Struct, tag_field="type", tag="direct"):
    """A tool is called by the model itself, and not by code of its in a sandbox."""


class ToolUse(Block, tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw
    caller: Direct | None = None


class ToolResult(Block, tag="tool_result"):
    tool_use_id: str
    content: str | list[Text | Image | Document] | None = None
    is_error: bool | None = None


class UserTurn(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="user"):
    content: str | list[Text | Image | Document | ToolResult]


class AssistantTurn(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    content: str | list[Text | Thinking | RedactedThinking | ToolUse]


class SystemTurn(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="system"):
    content: str | list[Text]


Turn = UserTurn | AssistantTurn | SystemTurn
Message = dict[str, Any]


def chat_messages(system: str | Sequence[Text] | None, turns: Sequence[Turn]) -> list[Message]:
    """Turns of one side that follow each other are one, as by Anthropic's rule. Raises `BadRequest`."""
    said: list[Message] = [{"role": "system", "content": _content(_blocks(system))}] if system else []
    numbered = enumerate(turns)
    for side, together in groupby(numbered, key=lambda turn: type(turn[1])):
        if side is SystemTurn:
            said += [{"role": "system", "content": _content(_blocks(turn.content))} for _, turn in together]
            continue
        placed = [
            (f"messages[{i}].content[{j}]", block)
            for i, turn in together
            for j, block in enumerate(_blocks(turn.content))
        ]
        said += _asked(placed) if side is UserTurn else [_answered(placed)]
    return said


def _blocks(content: Any) -> Sequence[Any]:
    return [Text(text=content)] if isinstance(content, str) else content or []


def _asked(placed: Sequence[tuple[str, Any]]) -> Iterator[Message]:
    """The results first: they belong to the calls right before them, wherever in the turn they stand."""
    rest = []
    for _, block in placed:
        if isinstance(block, ToolResult):
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
            yield marked(result, block.cache_control)
        else:
            rest.append(block)
    if rest or not placed:
        yield {"role": "user", "content": _content(rest)}


def _answered(placed: Sequence[tuple[str, Any]]) -> Message:
    texts, thoughts, signed, calls = [], [], [], []
    for path, block in placed:
        match block:
            case Text():
                texts.append(block)
            case Thinking():
                thoughts.append(block.thinking)
                if block.signature:
                    signed.append({"type": "thinking", "thinking": block.thinking, "signature": block.signature})
            case RedactedThinking():
                signed.append({"type": "redacted_thinking", "data": block.data})
            case ToolUse():
                calls.append(_call(path, block))
    message: Message = {"role": "assistant", "content": _content(texts) if texts or not calls else None}
    if said := "\n".join(filter(None, thoughts)):
        message["reasoning_content"] = said
    if signed:  # for the server that made them, as its provider wants to have them back
        message["thinking_blocks"] = signed
    if calls:
        message["tool_calls"] = calls
    return message


def _call(path: str, block: ToolUse) -> dict[str, Any]:
    arguments = bytes(block.input).decode()
    if not arguments.startswith("{"):
        raise BadRequest(f"{path}.input: it must be a JSON object", param=f"{path}.input")
    call = {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}
    return marked(call, block.cache_control)


def _result(block: ToolResult) -> str | list[Message]:
    blocks = _blocks(block.content)
    if block.is_error:
        first = blocks[:1]
        if not first or not isinstance(first[0], Text):
            blocks = [Text(text=ERROR_MARK), *blocks]
        else:
            blocks = [Text(text=ERROR_MARK + first[0].text, cache_control=first[0].cache_control), *blocks[1:]]
    return _content(blocks)


def _content(blocks: Sequence[Text | Image | Document]) -> str | list[Message]:
    """One text as a string, as most clients of chat write it; equal prompts by both doors are then equal."""
    if not blocks:
        return ""
    if len(blocks) == 1 and isinstance(blocks[0], Text) and blocks[0].cache_control is None:
        return blocks[0].text
    return [marked(_part(block), block.cache_control) for block in blocks]


def marked(value: Message, breakpoint: Breakpoint | None) -> Message:
    """A part, a message, a call or a tool of a chat."""
    return value if breakpoint is None else {**value, FIELD: breakpoint}


def forget_breakpoints(system: str | Sequence[Text] | None, turns: Sequence[Turn]) -> None:
    for block in (*_blocks(system), *(block for turn in turns for block in _blocks(turn.content))):
        block.cache_control = None
        if isinstance(block, ToolResult):
            for inner in _blocks(block.content):
                inner.cache_control = None


def _part(block: Text | Image | Document) -> Message:
    match block:
        case Text(text=text):
            return {"type": "text", "text": text}
        case Image(source=source):
            return {"type": "image_url", "image_url": {"url": _url(source)}}
        case Document(source=PlainSource(data=text), title=title):
            return {"type": "text", "text": f"{title}\n\n{text}" if title else text}
        case Document(source=Base64Source() as source, title=title):
            return {"type": "file", "file": {"filename": title or FILE_NAME, "file_data": _url(source)}}
    raise AssertionError(block)


def _url(source: Base64Source | URLSource) -> str:
    return source.url if isinstance(source, URLSource) else f"data:{source.media_type};base64,{source.data}"
