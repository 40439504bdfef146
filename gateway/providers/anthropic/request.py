"""A chat call in the words of Anthropic's Messages: the body of `POST /v1/messages`.

What Messages have no word for is refused by the name of its field. Left out is only what changes no answer: names for
routing and records, and hints.

Where neither the client nor its `prompt_cache_options` has said what the server is to cache, four breakpoints are set:
behind the tools, behind the system prompt, where the last turn before this one ended, and at the end. A server looks
back from a breakpoint over some twenty blocks only, which one turn with many tool calls exceeds. So the third stands
where the call before this one has written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.providers.anthropic.fields import Fields, UnsupportedField, check, read, reads
from gateway.providers.anthropic.turns import (
    BREAKPOINT,
    NOTHING,
    THOUGHTS,
    Block,
    Message,
    conversation,
    is_given,
    with_breakpoint,
)

_NO_SCHEMA = msgspec.Raw(b'{"type":"object","properties":{}}')


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = NOTHING
    strict: bool | None = None
    cache_control: msgspec.Raw = NOTHING


class _Tool(msgspec.Struct):
    type: str
    function: _Function | None = None
    cache_control: msgspec.Raw = NOTHING


class _JSONSchema(msgspec.Struct):
    schema: msgspec.Raw = NOTHING


class _ResponseFormat(msgspec.Struct):
    type: str
    json_schema: _JSONSchema | None = None


class _NamedFunction(msgspec.Struct):
    name: str


class _NamedTool(msgspec.Struct):
    type: str
    function: _NamedFunction | None = None


class _CacheOptions(msgspec.Struct):
    mode: str | None = None


class _TemplateOptions(msgspec.Struct, forbid_unknown_fields=True):
    """By which chat templates are told to think; they read the one name or the other."""

    enable_thinking: bool | None = None
    thinking: bool | None = None

    @property
    def wanted(self) -> bool | None:
        return self.thinking if self.enable_thinking is None else self.enable_thinking


class _Thinking(msgspec.Struct):
    type: str
    budget_tokens: int = 0


_messages = reads(list[Message])
_tools = reads(list[_Tool])
_format = reads(_ResponseFormat)
_choice = reads(str | _NamedTool)
_stop = reads(str | list[str])
_cache_options = reads(_CacheOptions)
_thinking = reads(_Thinking)
_template_options = reads(_TemplateOptions)
_text, _whole, _yes = reads(str), reads(int), reads(bool)

_TOOL_CHOICES = {"auto": "auto", "none": "none", "required": "any"}
_EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "max"}
_TIERS = {"auto": "auto", "priority": "auto", "scale": "auto", "default": "standard_only", "flex": "standard_only"}
_AS_THEY_ARE = ("temperature", "top_p", "top_k", "thinking", "cache_control")


def message_request(fields: Fields, model: str, default_max_tokens: int) -> dict[str, Any]:
    """Raises `UnsupportedField`."""
    check(fields)
    system, turns = conversation(read(fields, "messages", _messages) or [])
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(read(fields, "tools", _tools) or [])]
    if not (_is_marked(fields, tools, system, turns) or _is_explicit(fields)):
        _mark(tools, system, turns)
    request: dict[str, Any] = {"model": model, "max_tokens": _max_tokens(fields, default_max_tokens), "messages": turns}
    if system:
        request["system"] = system
    if tools:
        request["tools"] = tools
        if choice := _tool_choice(fields):
            request["tool_choice"] = choice
    request |= {name: value for name in _AS_THEY_ARE if is_given(value := fields.get(name, NOTHING))}
    if stop := read(fields, "stop", _stop):
        request["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    if user := read(fields, "safety_identifier", _text) or read(fields, "user", _text):
        request["metadata"] = {"user_id": user}
    if tier := read(fields, "service_tier", _text):
        request["service_tier"] = _one_of(_TIERS, tier, "service_tier")
    _say_how_to_answer(fields, request)
    return request


def _one_of(known: Mapping[str, str], value: str, param: str) -> str:
    try:
        return known[value]
    except KeyError:
        raise UnsupportedField(f"{value!r} is none of {', '.join(known)}", param) from None


def _max_tokens(fields: Fields, default: int) -> int:
    given: int | None = read(fields, "max_completion_tokens", _whole) or read(fields, "max_tokens", _whole)
    if given is not None:
        return given
    thinking: _Thinking | None = read(fields, "thinking", _thinking)
    # Its budget is a part of `max_tokens`, and would leave no answer.
    return default + (thinking.budget_tokens if thinking is not None else 0)


def _say_how_to_answer(fields: Fields, request: dict[str, Any]) -> None:
    config: dict[str, Any] = {}
    template: _TemplateOptions | None = read(fields, "chat_template_kwargs", _template_options)
    if template is not None and template.wanted is not None:
        request.setdefault("thinking", {"type": "adaptive" if template.wanted else "disabled"})
    if effort := read(fields, "reasoning_effort", _text):
        if effort == "none":
            request.setdefault("thinking", {"type": "disabled"})
        else:
            config["effort"] = _one_of(_EFFORTS, effort, "reasoning_effort")
            request.setdefault("thinking", {"type": "adaptive"})
    form = read(fields, "response_format", _format)
    if form is not None and form.type == "json_schema":
        if form.json_schema is None or not is_given(form.json_schema.schema):
            raise UnsupportedField("a schema is needed", "response_format.json_schema.schema")
        config["format"] = {"type": "json_schema", "schema": form.json_schema.schema}
    if config:
        request["output_config"] = config


# Tools


def _tool(tool: _Tool, where: str) -> Block:
    function = tool.function
    if tool.type != "function" or function is None:
        raise UnsupportedField(f"tools of the type {tool.type!r} can not be offered, functions can", f"{where}.type")
    schema = function.parameters if is_given(function.parameters) else _NO_SCHEMA
    block: Block = {"name": function.name, "input_schema": schema}
    if function.description:
        block["description"] = function.description
    if function.strict:
        block["strict"] = True
    return with_breakpoint(block, tool.cache_control or function.cache_control)


def _tool_choice(fields: Fields) -> Block | None:
    """None where it says nothing that is not so anyway."""
    given = read(fields, "tool_choice", _choice)
    one_at_a_time = read(fields, "parallel_tool_calls", _yes) is False
    if isinstance(given, _NamedTool):
        if given.type != "function" or given.function is None:
            raise UnsupportedField(f"a choice of the type {given.type!r} can not be made", "tool_choice.type")
        choice: Block = {"type": "tool", "name": given.function.name}
    elif given is None and not one_at_a_time:
        return None
    else:
        choice = {"type": _one_of(_TOOL_CHOICES, given or "auto", "tool_choice")}
    if one_at_a_time and choice["type"] != "none":
        choice["disable_parallel_tool_use"] = True
    return choice


# What is cached


def _is_explicit(fields: Fields) -> bool:
    options = read(fields, "prompt_cache_options", _cache_options)
    return options is not None and options.mode == "explicit"


def _is_marked(fields: Fields, tools: list[Block], system: list[Block], turns: list[Block]) -> bool:
    said = [block for turn in turns for block in turn["content"]]
    told = [part for block in said if block["type"] == "tool_result" for part in block.get("content", ())]
    whole = is_given(fields.get("cache_control", NOTHING))
    return whole or any("cache_control" in block for block in (*tools, *system, *said, *told))


def _mark(tools: list[Block], system: list[Block], turns: list[Block]) -> None:
    asked = [number for number, turn in enumerate(turns) if turn["role"] == "assistant" and number > 0]
    before = turns[asked[-1] - 1]["content"] if asked else []
    for blocks in (tools, system, before, turns[-1]["content"] if turns else []):
        able = [block for block in blocks if block.get("type") not in THOUGHTS]
        if able:
            able[-1]["cache_control"] = BREAKPOINT
