"""Translates a chat call to the body of Anthropic's `POST /v1/messages`.

A field that cannot be translated is rejected with an error that names it. A field is dropped only if it changes no
answer, such as an identifier for routing or logging, or a hint.

If the client has set no cache breakpoint, and its `prompt_cache_options` are not explicit, this module sets four
breakpoints: after the tools, after the system prompt, at the end of the previous call's prompt, and at the end of the
prompt. A server searches for a cache entry only about twenty blocks before a breakpoint, and an answer with many tool
calls has more blocks. The third breakpoint is therefore where the previous call wrote its cache entry.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.providers.anthropic.fields import check_fields
from gateway.providers.anthropic.turns import (
    BREAKPOINT,
    THINKING_TYPES,
    Block,
    conversation,
    with_breakpoint,
)
from gateway.providers.chat_request import (
    Function,
    ResponseFormat,
    read_functions,
    read_max_tokens,
    read_messages,
    read_stop,
    read_tool_choice,
)
from gateway.providers.translation import (
    NOTHING,
    Fields,
    field_decoder,
    is_given,
    one_of,
    read_field,
)


class _CacheOptions(msgspec.Struct):
    mode: str | None = None


class _TemplateOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options that switch thinking on in chat templates. Each template reads one of these two names."""

    enable_thinking: bool | None = None
    thinking: bool | None = None

    @property
    def enabled(self) -> bool | None:
        return self.thinking if self.enable_thinking is None else self.enable_thinking


class _Thinking(msgspec.Struct):
    type: str
    budget_tokens: int = 0


_format = field_decoder(ResponseFormat)
_cache_options = field_decoder(_CacheOptions)
_thinking = field_decoder(_Thinking)
_template_options = field_decoder(_TemplateOptions)
_text, _boolean = field_decoder(str), field_decoder(bool)

_TOOL_CHOICES = {"auto": "auto", "none": "none", "required": "any"}
_EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "max"}
_TIERS = {"auto": "auto", "priority": "auto", "scale": "auto", "default": "standard_only", "flex": "standard_only"}
_UNCHANGED = ("temperature", "top_p", "top_k", "thinking", "cache_control")


def message_request(fields: Fields, model: str, default_max_tokens: int) -> dict[str, Any]:
    """Translate a chat's top-level fields to the body of a Messages request. Raises `UnsupportedField`."""
    check_fields(fields)
    system, turns = conversation(read_messages(fields))
    tools = [_tool(function) for function in read_functions(fields)]
    if not (_has_breakpoints(fields, tools, system, turns) or _is_explicit(fields)):
        _set_breakpoints(tools, system, turns)
    request: dict[str, Any] = {"model": model, "max_tokens": _max_tokens(fields, default_max_tokens), "messages": turns}
    if system:
        request["system"] = system
    if tools:
        request["tools"] = tools
        if choice := _tool_choice(fields):
            request["tool_choice"] = choice
    request |= {name: value for name in _UNCHANGED if is_given(value := fields.get(name, NOTHING))}
    if stop := read_stop(fields):
        request["stop_sequences"] = stop
    if user := read_field(fields, "safety_identifier", _text) or read_field(fields, "user", _text):
        request["metadata"] = {"user_id": user}
    if tier := read_field(fields, "service_tier", _text):
        request["service_tier"] = one_of(_TIERS, tier, "service_tier")
    _add_output_options(fields, request)
    return request


def _max_tokens(fields: Fields, default: int) -> int:
    """Return the client's limit of output tokens, else the default. The Messages API requires a limit."""
    given = read_max_tokens(fields)
    if given is not None:
        return given
    thinking: _Thinking | None = read_field(fields, "thinking", _thinking)
    # `max_tokens` includes the thinking budget. The budget is added to the default to leave tokens for the answer.
    return default + (thinking.budget_tokens if thinking is not None else 0)


def _add_output_options(fields: Fields, request: dict[str, Any]) -> None:
    """Add thinking, effort and the output format to the request."""
    config: dict[str, Any] = {}
    template: _TemplateOptions | None = read_field(fields, "chat_template_kwargs", _template_options)
    if template is not None and template.enabled is not None:
        request.setdefault("thinking", {"type": "adaptive" if template.enabled else "disabled"})
    if effort := read_field(fields, "reasoning_effort", _text):
        if effort == "none":
            request.setdefault("thinking", {"type": "disabled"})
        else:
            config["effort"] = one_of(_EFFORTS, effort, "reasoning_effort")
            request.setdefault("thinking", {"type": "adaptive"})
    form = read_field(fields, "response_format", _format)
    if form is not None and form.type == "json_schema":
        config["format"] = {"type": "json_schema", "schema": form.schema}
    if config:
        request["output_config"] = config


# Tools


def _tool(function: Function) -> Block:
    block: Block = {"name": function.name, "input_schema": function.schema}
    if function.description:
        block["description"] = function.description
    if function.strict:
        block["strict"] = True
    return with_breakpoint(block, function.cache_control)


def _tool_choice(fields: Fields) -> Block | None:
    """Return the tool choice in Anthropic's form, or None if it is the default."""
    given, name = read_tool_choice(fields)
    one_at_a_time = read_field(fields, "parallel_tool_calls", _boolean) is False
    if name is not None:
        choice: Block = {"type": "tool", "name": name}
    elif not given and not one_at_a_time:
        return None
    else:
        choice = {"type": one_of(_TOOL_CHOICES, given or "auto", "tool_choice")}
    if one_at_a_time and choice["type"] != "none":
        choice["disable_parallel_tool_use"] = True
    return choice


# Cache breakpoints


def _is_explicit(fields: Fields) -> bool:
    options = read_field(fields, "prompt_cache_options", _cache_options)
    return options is not None and options.mode == "explicit"


def _has_breakpoints(fields: Fields, tools: list[Block], system: list[Block], turns: list[Block]) -> bool:
    """Whether the client has set a cache breakpoint anywhere, including inside a tool result."""
    blocks = [block for turn in turns for block in turn["content"]]
    parts = [part for block in blocks if block["type"] == "tool_result" for part in block.get("content", ())]
    of_request = is_given(fields.get("cache_control", NOTHING))
    return of_request or any("cache_control" in block for block in (*tools, *system, *blocks, *parts))


def _set_breakpoints(tools: list[Block], system: list[Block], turns: list[Block]) -> None:
    """Set the four cache breakpoints that the module's docstring describes. A thinking block cannot have one."""
    answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant" and number > 0]
    previous = turns[answers[-1] - 1]["content"] if answers else []  # where the previous call's prompt ended
    for blocks in (tools, system, previous, turns[-1]["content"] if turns else []):
        allowed = [block for block in blocks if block.get("type") not in THINKING_TYPES]
        if allowed:
            allowed[-1]["cache_control"] = BREAKPOINT
