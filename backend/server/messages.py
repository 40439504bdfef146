"""What a chat is made of: messages, and the tools that their author may be given."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from backend.server.request_body import validation_error

BREAKPOINT = "cache_control"  # where a hosted cache may cut: ours caches every block, and no template sees it


class TextPart(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str
    prompt_cache_breakpoint: Any = None  # the same in another vendor's words
    cache_control: Any = None


Content = str | list[TextPart]


class FunctionCall(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    id: str
    function: FunctionCall
    cache_control: Any = None
    index: int | None = None  # left in by clients that assembled the call from a stream


class _Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="role", kw_only=True):
    name: str | None = None
    cache_control: Any = None

    @property
    def role(self) -> str:
        return str(self.__struct_config__.tag)


class SystemMessage(_Message, frozen=True, tag="system"):
    content: Content


class DeveloperMessage(_Message, frozen=True, tag="developer"):
    content: Content


class UserMessage(_Message, frozen=True, tag="user"):
    content: Content


class AssistantMessage(_Message, frozen=True, tag="assistant", kw_only=True):
    """As an earlier answer came back, so the fields of an answer that say nothing are let in."""

    content: Content | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    thinking_blocks: list[Any] | None = None  # signed by another vendor, whose alone they are
    audio: None = None
    function_call: None = None


class ToolMessage(_Message, frozen=True, tag="tool", kw_only=True):
    content: Content
    tool_call_id: str


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class FunctionDefinition(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: FunctionDefinition
    cache_control: Any = None


class NamedFunction(Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: NamedFunction


def check_tools(tools: list[dict[str, Any]] | None) -> None:
    """Each is a `Tool`. Raises InvalidRequest."""
    try:
        msgspec.convert(tools, list[ToolDefinition] | None)
    except msgspec.ValidationError as error:
        raise validation_error(error, prefix="tools") from error
