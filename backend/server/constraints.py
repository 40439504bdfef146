"""What an answer must look like, as one grammar: a format or schema, tool calls, and reasoning before either."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from backend.engine import grammar
from backend.engine.grammar import CompiledGrammar, GrammarError, TokenSet
from backend.parsers.base import CallableTool, MarkerTerminal, ToolFormat, quoted
from backend.parsers.reasoning import NO_REASONING_RULES, ReasoningFormat
from backend.server.errors import InvalidRequest
from backend.server.messages import NamedToolChoice
from backend.server.model import ServedModel
from backend.server.requests import (
    ChatRequest,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
    TextFormat,
)

TEXT = "/(?s:.*)/"

T = TypeVar("T")


def is_constrained(request: GenerationRequest) -> bool:
    """Whether anything but the model has a say in what the answer looks like."""
    formats = (request.structured_outputs, request.guided_json, request.guided_regex, request.guided_choice)
    if any(asked is not None for asked in (*formats, request.guided_grammar)):
        return True
    if not isinstance(request.response_format, TextFormat | None):
        return True
    if not isinstance(request, ChatRequest) or not request.tools:
        return False
    strict = any(tool.strict for tool in callable_tools(request))
    return _is_forced(request) or strict or request.parallel_tool_calls is False


def token_constraint(model: ServedModel, request: GenerationRequest) -> TokenSet | None:
    """The tokens that alone may come, where a request says so. Raises InvalidRequest beside anything else to follow."""
    if request.allowed_token_ids is None:
        return None
    if is_constrained(request):
        raise InvalidRequest(
            "`allowed_token_ids` can not be combined with an answer that follows a grammar.", param="allowed_token_ids"
        )
    model.check_token_ids(request.allowed_token_ids, "allowed_token_ids")
    return TokenSet(request.allowed_token_ids, model.vocab_size)


def text_constraint(model: ServedModel, request: GenerationRequest) -> CompiledGrammar | None:
    """What a completion must follow. Raises InvalidRequest, naming the field at fault."""
    asked = _answer(request)
    if asked is None:
        return None
    _check_beside(request)
    return _compile(model, *asked)


def chat_constraint(model: ServedModel, request: ChatRequest, prompt: str) -> CompiledGrammar | None:
    """The same for a chat. `prompt`: as rendered; it may have begun the reasoning already."""
    asked = _answer(request)
    calls = _calls(model, request, or_answer=asked is not None)
    if asked is None and calls is None:
        return None
    _check_beside(request)
    if asked is not None:
        alone = _compile(model, *asked)  # so that what is wrong with it is said of it
        if calls is None and model.reasoning_format is None:
            return alone
    terminal = _terminals(model)
    rules = [_reasoning(model.reasoning_format, prompt, terminal), *([calls] if calls else ())]
    if calls is not None and _is_forced(request):
        return _compile(model, grammar.lark("\n".join([*rules, "start: reasoning head calls"])), "tools")
    if asked is not None:
        start = f"start: reasoning {'(head calls | opening @answer)' if calls else 'opening @answer'}"
        return _compile(model, grammar.nested("\n".join([*rules, start]), asked[0]), asked[1])
    return _compile(model, grammar.lark("\n".join([*rules, *_text_or_calls(model.tool_format, terminal)])), "tools")


def _calls(model: ServedModel, request: ChatRequest, *, or_answer: bool) -> str | None:
    """The rules of calls, where there must be some, or where what is called must be called as it is written."""
    tools = callable_tools(request)
    must_fit = _is_forced(request) or any(tool.strict for tool in tools)
    if model.tool_format is None and must_fit:
        field = "tool_choice" if _is_forced(request) else "tools"
        raise InvalidRequest(f"`{field}`: how this model calls tools is not known; see --tool-parser.", param=field)
    if model.tool_format is None or not (must_fit or (tools and (or_answer or request.parallel_tool_calls is False))):
        return None
    for tool in tools:
        if tool.parameters is not None:
            _compile(model, grammar.json_schema(tool.parameters), _parameters_field(request, tool))
    return model.tool_format.calls(tools, _terminals(model), parallel=request.parallel_tool_calls is not False)


def _is_forced(request: ChatRequest) -> bool:
    return request.tool_choice == "required" or isinstance(request.tool_choice, NamedToolChoice)


def callable_tools(request: ChatRequest) -> list[CallableTool]:
    """Those that the answer may call."""
    if request.tool_choice == "none":
        return []
    functions = [tool["function"] for tool in request.tools or ()]
    named = request.tool_choice.function.name if isinstance(request.tool_choice, NamedToolChoice) else None
    return [
        CallableTool(function["name"], function.get("parameters"), bool(function.get("strict")))
        for function in functions
        if named in (None, function["name"])
    ]


def _answer(request: GenerationRequest) -> tuple[str, str] | None:
    """The grammar of the answer itself, and the field that asks for it."""
    asked: list[tuple[str, str]] = []
    format = request.response_format
    if isinstance(format, JsonObjectFormat):
        asked.append((grammar.json_object(), "response_format"))
    if isinstance(format, JsonSchemaFormat):
        schema = format.json_schema.schema
        source = grammar.json_object() if schema is None else grammar.json_schema(schema)
        asked.append((source, "response_format.json_schema.schema"))
    guided = StructuredOutputs(
        json=request.guided_json,
        regex=request.guided_regex,
        choice=request.guided_choice,
        grammar=request.guided_grammar,
    )
    asked += _structured(guided, "guided_")
    if request.structured_outputs is not None:
        found = _structured(request.structured_outputs, "structured_outputs.")
        if not found:
            raise InvalidRequest("`structured_outputs` asks for nothing.", param="structured_outputs")
        asked += found
    if len(asked) > 1:
        fields = " and ".join(f"`{field}`" for _, field in asked)
        raise InvalidRequest(f"An answer can not follow {fields} at once.", param=asked[1][1])
    return asked[0] if asked else None


def _structured(asked: StructuredOutputs, prefix: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if asked.json is not None:
        schema = _schema(asked.json, f"{prefix}json")
        found.append((_made(grammar.json_schema, schema, f"{prefix}json"), f"{prefix}json"))
    if asked.regex is not None:
        found.append((grammar.regex(asked.regex), f"{prefix}regex"))
    if asked.choice is not None:
        choices = " | ".join(quoted(choice) for choice in asked.choice)
        found.append((grammar.lark(f"start: {choices}"), f"{prefix}choice"))
    if asked.grammar is not None:
        found.append((_made(grammar.lark, asked.grammar, f"{prefix}grammar"), f"{prefix}grammar"))
    if asked.json_object:
        found.append((grammar.json_object(), f"{prefix}json_object"))
    return found


def _made(make: Callable[[T], str], given: T, field: str) -> str:
    try:
        return make(given)
    except GrammarError as error:
        raise _unfit(field, error) from error


def _schema(given: dict[str, Any] | str, field: str) -> dict[str, Any] | bool:
    """vLLM takes a schema as text, too."""
    if not isinstance(given, str):
        return given
    try:
        schema = json.loads(given)
    except ValueError as error:
        raise InvalidRequest(f"`{field}` is not JSON: {error}.", param=field) from error
    except RecursionError as error:
        raise InvalidRequest(f"`{field}` is nested too deeply.", param=field) from error
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"`{field}` is no JSON schema.", param=field)
    return schema


def _check_beside(request: GenerationRequest) -> None:
    """What can not be had together with a grammar, which alone says where an answer ends."""
    for field, asked in (("ignore_eos", request.ignore_eos), ("min_tokens", request.min_tokens)):
        if asked:
            raise InvalidRequest(f"`{field}` can not be combined with an answer that follows a grammar.", param=field)


def _compile(model: ServedModel, source: str, field: str) -> CompiledGrammar:
    try:
        return model.grammars.compile(source)
    except GrammarError as error:
        raise _unfit(field, error) from error


def _unfit(field: str, error: GrammarError) -> InvalidRequest:
    return InvalidRequest(f"`{field}` can not be followed: {error}.", param=field)


def _parameters_field(request: ChatRequest, tool: CallableTool) -> str:
    names = [given["function"]["name"] for given in request.tools or ()]
    return f"tools[{names.index(tool.name)}].function.parameters"


def _reasoning(format: ReasoningFormat | None, prompt: str, terminal: MarkerTerminal) -> str:
    return NO_REASONING_RULES if format is None else format.rules(prompt, terminal)


def _text_or_calls(format: ToolFormat | None, terminal: MarkerTerminal) -> Sequence[str]:
    """An answer that may be text; but what it calls, it calls as it is written."""
    begins = format.begins if format else ""
    if not begins:  # a call is told by its first character
        return ["start: reasoning (opening TEXT | head calls)", r"TEXT: /([^{\s](?s:.*))?/"]
    if terminal(begins) != quoted(begins):  # a special token, which no text contains
        choice = "(opening TEXT | head calls)" if format and format.stands_alone else "opening TEXT (head calls)?"
        return [f"start: reasoning {choice}", f"TEXT: {TEXT}"]
    pattern = re.sub(r"([\[\]|])", r"\\\1", begins)
    return [
        "start: reasoning (opening TEXT | before calls)",
        f"TEXT: {TEXT} & ~/(?s:.*){pattern}(?s:.*)/",
        f"before[suffix={quoted(begins)}]: {TEXT}",
    ]


def _terminals(model: ServedModel) -> MarkerTerminal:
    def terminal(text: str) -> str:
        token_id = model.codec.special_token_id(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    return terminal
