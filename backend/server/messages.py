"""Types of chat messages and tool definitions in OpenAI's format. Unknown fields are rejected.

`unknown_members.py` removes the unknown members of messages before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from backend.server.request_body import validation_error

BREAKPOINT = "cache_control"  # Anthropic's cache breakpoint: accepted and removed, since every block is cached anyway


class TextPart(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str
    prompt_cache_breakpoint: Any = None  # OpenAI's breakpoint, accepted like `cache_control`
    cache_control: Any = None


class ImageUrl(Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    detail: str | None = None  # accepted: an image's tokens depend on its size alone, as in vLLM


class ImagePart(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image_url"):
    image_url: ImageUrl | str
    prompt_cache_breakpoint: Any = None
    cache_control: Any = None

    @property
    def url(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


TextContent = str | list[TextPart]
Content = str | list[TextPart | ImagePart]


class FunctionCall(Struct, frozen=True, forbid_unknown_fields=True):
    """Name and arguments of a tool call. `arguments` is JSON as the model wrote it, so it can be invalid."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """A tool call in an assistant message."""

    id: str
    function: FunctionCall
    cache_control: Any = None
    index: int | None = None  # sent by clients that assembled the call from stream deltas


class _Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="role", kw_only=True):
    name: str | None = None
    cache_control: Any = None

    @property
    def role(self) -> str:
        return str(self.__struct_config__.tag)


class SystemMessage(_Message, frozen=True, tag="system"):
    content: TextContent


class DeveloperMessage(_Message, frozen=True, tag="developer"):
    """System message under OpenAI's newer name, `developer`."""

    content: TextContent


class UserMessage(_Message, frozen=True, tag="user"):
    content: Content


class AssistantMessage(_Message, frozen=True, tag="assistant", kw_only=True):
    """Assistant message: an earlier output that the client sends back.

    Fields of a response that do not affect the prompt are accepted.
    """

    content: TextContent | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    thinking_blocks: list[Any] | None = None  # signed by Anthropic, of no use to other models
    audio: None = None
    function_call: None = None


class ToolMessage(_Message, frozen=True, tag="tool", kw_only=True):
    """Message with the result of a tool call."""

    content: Content
    tool_call_id: str


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


def image_parts(messages: Sequence[Message]) -> Iterator[tuple[str, ImagePart]]:
    """Yields the images of a conversation in their order, each with the path of its field."""
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImagePart):
                yield f"messages[{i}].content[{j}].image_url", part


def num_tool_calls(messages: Sequence[Message]) -> int:
    """Returns the number of tool calls in a conversation."""
    return sum(len(message.tool_calls or ()) for message in messages if isinstance(message, AssistantMessage))


class FunctionDefinition(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """Definition of a tool that the model can call."""

    function: FunctionDefinition
    cache_control: Any = None


class NamedFunction(Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """Value of `tool_choice` that forces a call of one function."""

    function: NamedFunction


def check_tools(tools: list[dict[str, Any]] | None) -> None:
    """Checks that each tool is a valid `ToolDefinition`. Raises InvalidRequest with the field's path."""
    try:
        msgspec.convert(tools, list[ToolDefinition] | None)
    except msgspec.ValidationError as error:
        raise validation_error(error, prefix="tools") from error
