"""Types of the content blocks in Anthropic's messages, and their translation to chat messages.

Both formats have text, images, tool calls and tool results, but in different layouts. A message of Anthropic's API is a
list of blocks. A tool result is a block of the user's message, and a tool call is a block of the assistant's message.
In chat, each tool result is a separate message, and tool calls are a field beside the content.

The types forbid unknown fields, because no deployment would get them. A request with an unknown field is rejected with
an error that names the field.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal

import msgspec

from gateway.core.cache_breakpoints import FIELD
from gateway.core.errors import BadRequest

ERROR_PREFIX = "Error: "  # precedes the text of a failed tool result: chat has no `is_error`
DEFAULT_FILE_NAME = "document"  # name of a file without a title; chat requires one


class CacheControl(msgspec.Struct, omit_defaults=True):
    """A cache breakpoint: the deployment caches the prompt up to it for `ttl`. Fields such as `scope` are dropped."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """Base class of the content blocks. The field `type` tells them apart."""

    cache_control: CacheControl | None = None


class TextBlock(Block, tag="text"):
    """A text in a message of any role."""

    text: str
    citations: Any = None  # part of an earlier answer; ignored, because the text is complete without citations


class Base64Source(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="base64"):
    """An image or file whose bytes are in the request, as base64."""

    media_type: str
    data: str


class URLSource(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="url"):
    """The URL of an image or a document. The deployment fetches it; the gateway never does."""

    url: str


class ImageBlock(Block, tag="image"):
    source: Base64Source | URLSource


class PlainTextSource(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A document whose text is in the request. In chat it becomes a text part."""

    data: str
    media_type: Literal["text/plain"] = "text/plain"


class CitationsDisabled(msgspec.Struct, forbid_unknown_fields=True):
    """The citations option of a document. Only "disabled" is supported, because chat has no citations."""

    enabled: Literal[False] = False


class ContentSource(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="content"):
    """A document that is made of texts and images. In chat they become parts."""

    content: str | list[TextBlock | ImageBlock]


class DocumentBlock(Block, tag="document"):
    """A document: a file, such as a PDF, a plain text, or texts and images. `context` is text about it."""

    source: Base64Source | PlainTextSource | URLSource | ContentSource
    context: str | None = None
    title: str | None = None
    citations: CitationsDisabled | None = None


class ThinkingBlock(Block, tag="thinking"):
    """A thinking block of an earlier answer."""

    thinking: str
    signature: str | None = None  # set only by deployments of Anthropic's API


class RedactedThinkingBlock(Block, tag="redacted_thinking"):
    """A thinking block of an earlier answer whose text Anthropic does not show."""

    data: str  # encrypted: only the deployment that made it can read it


class DirectCaller(msgspec.Struct, tag_field="type", tag="direct"):
    """States that the model called the tool directly, and not through code in a sandbox."""


class ToolUseBlock(Block, tag="tool_use"):
    """A tool call of an earlier answer. `input` must be a JSON object, and its bytes are not changed."""

    id: str
    name: str
    input: msgspec.Raw
    caller: DirectCaller | None = None


class ToolResultBlock(Block, tag="tool_result"):
    """The result of a tool call, in the user's message that follows the call."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


class UserTurn(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="user"):
    content: str | list[TextBlock | ImageBlock | DocumentBlock | ToolResultBlock]


class AssistantTurn(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    content: str | list[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock]


class SystemTurn(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="system"):
    content: str | list[TextBlock]


Turn = UserTurn | AssistantTurn | SystemTurn
Json = dict[str, Any]


def chat_messages(system: str | Sequence[TextBlock] | None, turns: Sequence[Turn]) -> list[Json]:
    """Translate a conversation to chat messages. Raises `BadRequest`.

    Consecutive messages of the same role are joined into one, as in Anthropic's API.
    """
    messages: list[Json] = [{"role": "system", "content": _content(_blocks(system))}] if system else []
    numbered = enumerate(turns)
    for role, group in groupby(numbered, key=lambda turn: type(turn[1])):
        if role is SystemTurn:
            messages += [{"role": "system", "content": _content(_blocks(turn.content))} for _, turn in group]
            continue
        placed = [
            (f"messages[{i}].content[{j}]", block) for i, turn in group for j, block in enumerate(_blocks(turn.content))
        ]
        messages += _user_messages(placed) if role is UserTurn else [_assistant_message(placed)]
    return messages


def _blocks(content: Any) -> Sequence[Any]:
    return [TextBlock(text=content)] if isinstance(content, str) else content or []


def _user_messages(placed: Sequence[tuple[str, Any]]) -> Iterator[Json]:
    """Yield the tool results first, because chat requires them directly after the tool calls."""
    rest = []
    for _, block in placed:
        if isinstance(block, ToolResultBlock):
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
            yield with_cache_control(result, block.cache_control)
        else:
            rest.append(block)
    if rest or not placed:
        yield {"role": "user", "content": _content(rest)}


def _assistant_message(placed: Sequence[tuple[str, Any]]) -> Json:
    texts, thinking, signed, calls = [], [], [], []
    for path, block in placed:
        match block:
            case TextBlock():
                texts.append(block)
            case ThinkingBlock():
                thinking.append(block.thinking)
                if block.signature:
                    signed.append({"type": "thinking", "thinking": block.thinking, "signature": block.signature})
            case RedactedThinkingBlock():
                signed.append({"type": "redacted_thinking", "data": block.data})
            case ToolUseBlock():
                calls.append(_call(path, block))
    message: Json = {"role": "assistant", "content": _content(texts) if texts or not calls else None}
    # Chat templates read `reasoning_content`. The `anthropic` provider reads `thinking_blocks`.
    if reasoning := "\n".join(filter(None, thinking)):
        message["reasoning_content"] = reasoning
    if signed:  # the provider must send signed blocks unchanged to the deployment that made them
        message["thinking_blocks"] = signed
    if calls:
        message["tool_calls"] = calls
    return message


def _call(path: str, block: ToolUseBlock) -> dict[str, Any]:
    arguments = bytes(block.input).decode()
    if not arguments.startswith("{"):
        raise BadRequest(f"{path}.input: must be a JSON object", param=f"{path}.input")
    call = {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}
    return with_cache_control(call, block.cache_control)


def _result(block: ToolResultBlock) -> str | list[Json]:
    blocks = _blocks(block.content)
    if block.is_error:
        first = blocks[:1]
        if not first or not isinstance(first[0], TextBlock):
            blocks = [TextBlock(text=ERROR_PREFIX), *blocks]
        else:
            blocks = [TextBlock(text=ERROR_PREFIX + first[0].text, cache_control=first[0].cache_control), *blocks[1:]]
    return _content(blocks)


def _content(blocks: Sequence[TextBlock | ImageBlock | DocumentBlock]) -> str | list[Json]:
    """Return blocks as chat content. A single text becomes a string.

    Most chat clients send a single text as a string. Equal prompts of both APIs therefore share a prefix.
    """
    if not blocks:
        return ""
    if len(blocks) == 1 and isinstance(blocks[0], TextBlock) and blocks[0].cache_control is None:
        return blocks[0].text
    parts: list[Json] = []
    for block in blocks:
        *earlier, last = _parts(block)
        parts += [*earlier, with_cache_control(last, block.cache_control)]
    return parts


def with_cache_control(value: Json, cache_control: CacheControl | None) -> Json:
    """Return a part, message, tool call or tool of a chat with the given cache breakpoint, if there is one."""
    return value if cache_control is None else {**value, FIELD: cache_control}


def drop_cache_control(system: str | Sequence[TextBlock] | None, turns: Sequence[Turn]) -> None:
    """Remove all cache breakpoints from decoded messages, in place."""
    for block in (*_blocks(system), *(block for turn in turns for block in _blocks(turn.content))):
        block.cache_control = None
        if isinstance(block, ToolResultBlock):
            for inner in _blocks(block.content):
                inner.cache_control = None


def _parts(block: TextBlock | ImageBlock | DocumentBlock) -> list[Json]:
    """Return the parts of a block, at least one."""
    match block:
        case TextBlock(text=text):
            return [{"type": "text", "text": text}]
        case ImageBlock(source=source):
            return [{"type": "image_url", "image_url": {"url": _url(source)}}]
    about = [text for text in (block.title, block.context) if text]
    match block.source:
        case PlainTextSource(data=text):
            return [{"type": "text", "text": "\n\n".join((*about, text))}]
        case ContentSource(content=content):
            inner = [part for each in _blocks(content) for part in _parts(each)]
            return [*({"type": "text", "text": text} for text in about), *inner] or [{"type": "text", "text": ""}]
        case Base64Source() as source:
            where = {"file_data": _url(source)}
        case URLSource(url=url):
            where = {"file_url": url}
    file = {"type": "file", "file": {"filename": block.title or DEFAULT_FILE_NAME, **where}}
    return [*([{"type": "text", "text": block.context}] if block.context else ()), file]


def _url(source: Base64Source | URLSource) -> str:
    return source.url if isinstance(source, URLSource) else f"data:{source.media_type};base64,{source.data}"
