"""Types of Anthropic's request body, and its translation to the fields of a chat request.

Every field has a type here. An unknown field is rejected with an error that names it, because no deployment would get
the field, and ignoring it would suggest that it has an effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from gateway.core.errors import BadRequest
from gateway.endpoints.messages.blocks import (
    AssistantTurn,
    CacheControl,
    TextBlock,
    Turn,
    chat_messages,
    drop_cache_control,
    with_cache_control,
)
from gateway.endpoints.messages.client_tools import CLIENT_TOOLS, client_tool
from gateway.prompts.reader import MAX_TOKENS, Fields, Name

SCHEMA_NAME = "answer"  # chat requires a name for the schema of an answer
# Fields that have the same name and form in a chat request.
_SAME_IN_CHAT = ("max_tokens", "stream", "temperature", "top_p", "top_k")
Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
_encode = msgspec.json.encode


class _Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base class of the request's types. Unknown fields are errors."""


class AutoToolChoice(_Strict, tag_field="type", tag="auto"):
    """The model may call tools."""

    disable_parallel_tool_use: bool = False


class AnyToolChoice(_Strict, tag_field="type", tag="any"):
    """The model must call a tool. In chat this choice is `required`."""

    disable_parallel_tool_use: bool = False


class NamedToolChoice(_Strict, tag_field="type", tag="tool"):
    """The model must call this tool."""

    name: str
    disable_parallel_tool_use: bool = False


class NoToolChoice(_Strict, tag_field="type", tag="none"):
    """The model must not call tools."""


class CustomTool(_Strict):
    """A tool that the client runs. `eager_input_streaming` has no effect: arguments always stream at once."""

    name: str
    input_schema: msgspec.Raw
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


ThinkingDisplay = Literal["summarized", "omitted"]


class ThinkingEnabled(_Strict, tag_field="type", tag="enabled"):
    """The model thinks before it answers."""

    budget_tokens: Positive | None = None  # not enforced, because engines limit only the total, by `max_tokens`
    display: ThinkingDisplay | None = None


class ThinkingAdaptive(_Strict, tag_field="type", tag="adaptive"):
    """The model decides whether to think. This is every model's default."""

    display: ThinkingDisplay | None = None


class ThinkingDisabled(_Strict, tag_field="type", tag="disabled"):
    """The model does not think."""


class OutputFormat(_Strict, tag_field="type", tag="json_schema"):
    """The answer must be JSON that conforms to `schema`."""

    schema: msgspec.Raw


class OutputConfig(_Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class RequestMetadata(_Strict):
    user_id: Name | None = None


class ClearThinking(msgspec.Struct, tag_field="type", tag="clear_thinking_20251015"):
    """Omits the thinking of earlier answers from the prompt. Has no effect, because chat templates always omit it."""


class ContextManagement(_Strict):
    edits: list[ClearThinking] = []


class PromptBody(_Strict):
    """The fields that make up the prompt. They are the complete body of POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[Turn], msgspec.Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: AutoToolChoice | AnyToolChoice | NamedToolChoice | NoToolChoice | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None  # a breakpoint at the end of the prompt
    speed: Literal["standard"] | None = None


class MessagesBody(PromptBody, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: Positive
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: RequestMetadata | None = None
    service_tier: Name | None = None


class _ToolType(msgspec.Struct):
    type: str | None = None


_kind = msgspec.json.Decoder(_ToolType)
_tool = msgspec.json.Decoder(CustomTool)


def shows_thinking(thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None) -> bool:
    """Whether to send thinking to the client. Reasoning models think even if the request does not mention it."""
    if isinstance(thinking, ThinkingDisabled):
        return False
    return thinking is None or thinking.display != "omitted"


def prompt_fields(body: PromptBody, *, with_breakpoints: bool) -> Fields:
    """Translate the prompt's fields to the fields of a chat request. Raises `BadRequest`.

    If `with_breakpoints` is false, `cache_control` is removed from `body` in place.
    """
    if not with_breakpoints:
        drop_cache_control(body.system, body.messages)
    chat: dict[str, Any] = {"model": body.model, "messages": chat_messages(body.system, body.messages)}
    if with_breakpoints and body.cache_control is not None:
        chat["cache_control"] = body.cache_control
    if body.tools:
        chat["tools"] = [
            _chat_tool(f"tools[{i}]", bytes(tool), with_breakpoint=with_breakpoints)
            for i, tool in enumerate(body.tools)
        ]
    if body.tool_choice is not None:
        chat |= _choice(body.tool_choice)
    if isinstance(body.messages[-1], AssistantTurn) and not chat["messages"][-1].get("tool_calls"):
        # A final message of the assistant is a prefill, which the answer must continue.
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    if isinstance(body.thinking, (ThinkingEnabled, ThinkingDisabled)):
        wanted = isinstance(body.thinking, ThinkingEnabled)
        # A chat template reads one of these two names.
        chat["chat_template_kwargs"] = {"enable_thinking": wanted, "thinking": wanted}
    if body.output_config is not None:
        chat |= _output(body.output_config)
    return _as_fields(chat)


def chat_fields(body: MessagesBody, fields: Fields, *, with_breakpoints: bool) -> Fields:
    """Translate a body to the fields of a chat request. `fields` are its fields as bytes. Raises `BadRequest`."""
    metadata = body.metadata or RequestMetadata()
    chat = {
        **{name: fields[name] for name in _SAME_IN_CHAT if getattr(body, name) is not None},
        "stop": body.stop_sequences or None,
        "stream_options": {"include_usage": True} if body.stream else None,
        "user": metadata.user_id,
        "service_tier": "default" if body.service_tier == "standard_only" else body.service_tier,
    }
    return prompt_fields(body, with_breakpoints=with_breakpoints) | _as_fields(
        {name: value for name, value in chat.items() if value is not None}
    )


def _as_fields(values: dict[str, Any]) -> Fields:
    return {name: msgspec.Raw(_encode(value)) for name, value in values.items()}


def _chat_tool(path: str, tool: bytes, *, with_breakpoint: bool) -> dict[str, Any]:
    try:
        kind = _kind.decode(tool).type
        if kind is not None and kind in CLIENT_TOOLS:
            return client_tool(path, kind, tool, with_breakpoint=with_breakpoint)
        if kind not in (None, "custom"):
            message = f"{path}.type: the tool {kind[:100]!r} is not supported; only tools that the client runs are"
            raise BadRequest(message, param=f"{path}.type")
        decoded = _tool.decode(tool)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{path}: {error}", param=path) from None
    function: dict[str, Any] = {"name": decoded.name}
    if decoded.description is not None:
        function["description"] = decoded.description
    function["parameters"] = decoded.input_schema
    if decoded.strict is not None:
        function["strict"] = decoded.strict
    return with_cache_control(
        {"type": "function", "function": function}, decoded.cache_control if with_breakpoint else None
    )


def _choice(choice: AutoToolChoice | AnyToolChoice | NamedToolChoice | NoToolChoice) -> dict[str, Any]:
    if isinstance(choice, NoToolChoice):
        return {"tool_choice": "none"}
    parallel: dict[str, Any] = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    match choice:
        case AutoToolChoice():
            return {"tool_choice": "auto", **parallel}
        case AnyToolChoice():
            return {"tool_choice": "required", **parallel}
        case NamedToolChoice(name=name):
            return {"tool_choice": {"type": "function", "function": {"name": name}}, **parallel}


def _output(config: OutputConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if config.effort is not None:
        fields["reasoning_effort"] = config.effort
    if config.format is not None:
        schema = {"name": SCHEMA_NAME, "schema": config.format.schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields
