"""The body of a request on Anthropic's wire, and chat's fields for it.

Every field has a type here, and one that is not known is refused by its name: what a server would not hear of must not
look as if it had been heeded.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from gateway.core.errors import BadRequest
from gateway.endpoints.messages.blocks import (
    AssistantTurn,
    Breakpoint,
    Text,
    Turn,
    chat_messages,
    forget_breakpoints,
    marked,
)
from gateway.prompts.reader import MAX_TOKENS, Fields, Name

SCHEMA_NAME = "answer"  # chat wants one for the schema of an answer
_THE_SAME = ("max_tokens", "stream", "temperature", "top_p", "top_k")  # in chat, and as they are written
Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
_encode = msgspec.json.encode


class _Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Of which nothing is ignored."""


class AutoChoice(_Strict, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool = False


class AnyChoice(_Strict, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool = False


class NamedChoice(_Strict, tag_field="type", tag="tool"):
    name: str
    disable_parallel_tool_use: bool = False


class NoChoice(_Strict, tag_field="type", tag="none"):
    pass


class Tool(_Strict):
    """One that the client runs. `eager_input_streaming` changes nothing: arguments are streamed as they are made."""

    name: str
    input_schema: msgspec.Raw
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Breakpoint | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


Shown = Literal["summarized", "omitted"]


class Enabled(_Strict, tag_field="type", tag="enabled"):
    budget_tokens: Positive | None = None  # within `max_tokens`, which is the bound that servers keep
    display: Shown | None = None


class Adaptive(_Strict, tag_field="type", tag="adaptive"):
    display: Shown | None = None


class Disabled(_Strict, tag_field="type", tag="disabled"):
    pass


class SchemaFormat(_Strict, tag_field="type", tag="json_schema"):
    schema: msgspec.Raw


class OutputConfig(_Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None


class Metadata(_Strict):
    user_id: Name | None = None


class ClearThinking(msgspec.Struct, tag_field="type", tag="clear_thinking_20251015"):
    """Earlier turns' thinking is left out of the prompt, as chat templates do by themselves."""


class ContextManagement(_Strict):
    edits: list[ClearThinking] = []


class PromptBody(_Strict):
    """What a prompt is made of: all that is counted."""

    model: str
    messages: Annotated[list[Turn], msgspec.Meta(min_length=1)]
    system: str | list[Text] | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None = None
    thinking: Enabled | Adaptive | Disabled | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: Breakpoint | None = None  # at the end of the prompt, wherever that is
    speed: Literal["standard"] | None = None


class MessagesBody(PromptBody, kw_only=True):
    max_tokens: Positive
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Name | None = None


class _Kind(msgspec.Struct):
    type: str | None = None


_kind = msgspec.json.Decoder(_Kind)
_tool = msgspec.json.Decoder(Tool)


def shows_thinking(thinking: Enabled | Adaptive | Disabled | None) -> bool:
    """Whether the client wants to see it; servers that think do so unasked."""
    if isinstance(thinking, Disabled):
        return False
    return thinking is None or thinking.display != "omitted"


def prompt_fields(body: PromptBody, *, with_breakpoints: bool) -> Fields:
    """Chat's fields for the prompt. Raises `BadRequest`."""
    if not with_breakpoints:
        forget_breakpoints(body.system, body.messages)
    said: dict[str, Any] = {"model": body.model, "messages": chat_messages(body.system, body.messages)}
    if with_breakpoints and body.cache_control is not None:
        said["cache_control"] = body.cache_control
    if body.tools:
        said["tools"] = [
            _chat_tool(f"tools[{i}]", bytes(tool), with_breakpoint=with_breakpoints)
            for i, tool in enumerate(body.tools)
        ]
    if body.tool_choice is not None:
        said |= _choice(body.tool_choice)
    if isinstance(body.messages[-1], AssistantTurn) and not said["messages"][-1].get("tool_calls"):
        # The answer begins with what the client has put there.
        said |= {"add_generation_prompt": False, "continue_final_message": True}
    if isinstance(body.thinking, (Enabled, Disabled)):
        wanted = isinstance(body.thinking, Enabled)
        said["chat_template_kwargs"] = {
            "enable_thinking": wanted,
            "thinking": wanted,
        }  # templates read the one or other
    if body.output_config is not None:
        said |= _output(body.output_config)
    return _raw(said)


def chat_fields(body: MessagesBody, fields: Fields, *, with_breakpoints: bool) -> Fields:
    """All of chat's fields; `fields` are the body's own. Raises `BadRequest`."""
    metadata = body.metadata or Metadata()
    said = {
        **{name: fields[name] for name in _THE_SAME if getattr(body, name) is not None},
        "stop": body.stop_sequences or None,
        "stream_options": {"include_usage": True} if body.stream else None,
        "user": metadata.user_id,
        "service_tier": "default" if body.service_tier == "standard_only" else body.service_tier,
    }
    return prompt_fields(body, with_breakpoints=with_breakpoints) | _raw(
        {name: value for name, value in said.items() if value is not None}
    )


def _raw(said: dict[str, Any]) -> Fields:
    return {name: msgspec.Raw(_encode(value)) for name, value in said.items()}


def _chat_tool(path: str, tool: bytes, *, with_breakpoint: bool) -> dict[str, Any]:
    try:
        kind = _kind.decode(tool).type
        if kind not in (None, "custom"):
            message = (
                f"{path}.type: no server here runs the tool {kind[:100]!r}; only tools that the client runs are known"
            )
            raise BadRequest(message, param=f"{path}.type")
        known = _tool.decode(tool)
    except msgspec.ValidationError as problem:
        raise BadRequest(f"{path}: {problem}", param=path) from None
    function: dict[str, Any] = {"name": known.name}
    if known.description is not None:
        function["description"] = known.description
    function["parameters"] = known.input_schema
    if known.strict is not None:
        function["strict"] = known.strict
    return marked({"type": "function", "function": function}, known.cache_control if with_breakpoint else None)


def _choice(choice: AutoChoice | AnyChoice | NamedChoice | NoChoice) -> dict[str, Any]:
    if isinstance(choice, NoChoice):
        return {"tool_choice": "none"}
    said: dict[str, Any] = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    match choice:
        case AutoChoice():
            return {"tool_choice": "auto", **said}
        case AnyChoice():
            return {"tool_choice": "required", **said}
        case NamedChoice(name=name):
            return {"tool_choice": {"type": "function", "function": {"name": name}}, **said}


def _output(config: OutputConfig) -> dict[str, Any]:
    said: dict[str, Any] = {}
    if config.effort is not None:
        said["reasoning_effort"] = config.effort
    if config.format is not None:
        schema = {"name": SCHEMA_NAME, "schema": config.format.schema, "strict": True}
        said["response_format"] = {"type": "json_schema", "json_schema": schema}
    return said
