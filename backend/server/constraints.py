"""Builds the grammar that constrains a model's output: reasoning, then tool calls or text in a required format.

A request can constrain its output by `response_format`, `structured_outputs`, the older `guided_*` fields,
`tool_choice` and `strict` tools. `chat_constraint` and `text_constraint` combine these into one Lark grammar, which
llguidance compiles. `token_constraint` implements `allowed_token_ids`, which needs no grammar. An unusable constraint
raises InvalidRequest with the name of its field.

The grammar of a chat has these rules. `reasoning` and `opening` come from the model's reasoning format. `head` (the
marker before the first call) and `calls` come from its tool format. `answer` is the required format of the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from backend.engine import grammar
from backend.engine.constraint import Constraint
from backend.engine.grammar import CompiledGrammar, GrammarError, GrammarsExhausted, TokenSet
from backend.parsers.base import CallableTool, MarkerTerminal, ToolFormat, quoted
from backend.parsers.reasoning import NO_REASONING_RULES, ReasoningFormat
from backend.parsers.unsupported_patterns import without_unsupported_patterns
from backend.server.errors import GrammarsBusy, InvalidRequest
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
RELAXED_HEADER = "x-schema-relaxed"
MAX_RELAXED_CHARS = 512
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")


@dataclass(frozen=True, slots=True)
class RequiredGrammar:
    """A grammar, the field that requires it, and what of the field it does not enforce."""

    source: str
    field: str
    ignored: Sequence[str] = ()


def is_constrained(request: GenerationRequest) -> bool:
    """Whether the output must follow a grammar."""
    formats = (request.structured_outputs, request.guided_json, request.guided_regex, request.guided_choice)
    if any(value is not None for value in (*formats, request.guided_grammar)):
        return True
    if not isinstance(request.response_format, TextFormat | None):
        return True
    if not isinstance(request, ChatRequest) or not request.tools:
        return False
    strict = any(tool.strict for tool in callable_tools(request))
    return is_call_forced(request) or strict or request.parallel_tool_calls is False


def relaxed_header(constraint: Constraint | None) -> dict[str, str]:
    """Returns the response header that says what of a schema that is not strict is not enforced."""
    if constraint is None or not constraint.ignored:
        return {}
    words = "; ".join(constraint.ignored).encode("ascii", "replace").decode()
    return {RELAXED_HEADER: f"{constraint.field}: {_UNPRINTABLE.sub('?', words)[:MAX_RELAXED_CHARS]}"}


def token_constraint(model: ServedModel, request: GenerationRequest) -> TokenSet | None:
    """Returns the constraint of `allowed_token_ids`, or None if the request has no such field.

    Raises InvalidRequest if the request also requires a grammar.
    """
    if request.allowed_token_ids is None:
        return None
    if is_constrained(request):
        raise InvalidRequest(
            "`allowed_token_ids` cannot be combined with structured output.", param="allowed_token_ids"
        )
    model.check_token_ids(request.allowed_token_ids, "allowed_token_ids")
    return TokenSet(request.allowed_token_ids, model.vocab_size)


def text_constraint(model: ServedModel, request: GenerationRequest) -> CompiledGrammar | None:
    """Returns the grammar of a completion, or None if its output is not constrained. Raises InvalidRequest."""
    required = _output_grammar(request)
    if required is None:
        return None
    _check_compatible(request)
    return _compile(model, request, required)


def chat_constraint(model: ServedModel, request: ChatRequest, prompt: str) -> CompiledGrammar | None:
    """Returns the grammar of a chat, or None if its output is not constrained. Raises InvalidRequest.

    `prompt` is the prompt's text after the chat template. It can end inside the reasoning.
    """
    required = _output_grammar(request)
    calls = _call_rules(model, request, or_answer=required is not None)
    if required is None and calls is None:
        return None
    _check_compatible(request)
    if required is not None and calls is None and model.reasoning_format is None:
        return _compile(model, request, required)
    terminal = _terminals(model)
    rules = [_reasoning_rules(model.reasoning_format, prompt, terminal), *([calls.source] if calls else ())]
    forced = calls is not None and is_call_forced(request)
    if required is not None and not forced:
        start = f"start: reasoning {'(head calls | opening @answer)' if calls else 'opening @answer'}"
        source, field = grammar.nested("\n".join([*rules, start]), required.source), required.field
    else:
        ends = ["start: reasoning head calls"] if forced else _text_or_calls_rules(model.tool_format, terminal)
        source, field = grammar.lark("\n".join([*rules, *ends])), "tools"
    ignored = [word for part in (required, calls) if part is not None for word in part.ignored]
    try:
        return _compiled(model, request, RequiredGrammar(source, field, ignored))
    except GrammarsExhausted as error:
        raise _busy(error) from error
    except GrammarError as error:
        _blame_part(model, request, required, with_tools=calls is not None)
        raise _grammar_error(field, error) from error


def _blame_part(
    model: ServedModel, request: ChatRequest, required: RequiredGrammar | None, *, with_tools: bool
) -> None:
    """Raises InvalidRequest with the field of the first part of a grammar that cannot be compiled alone."""
    parts = [required] if required else []
    for tool in callable_tools(request) if with_tools else ():
        if tool.parameters is not None:
            parts.append(_schema_grammar(tool.parameters, _parameters_field(request, tool), strict=tool.strict))
    for part in parts:
        try:
            model.grammars.check(part.source, request.cache_salt or "")
        except GrammarsExhausted as error:
            raise _busy(error) from error
        except GrammarError as error:
            raise _grammar_error(part.field, error) from error


def _call_rules(model: ServedModel, request: ChatRequest, *, or_answer: bool) -> RequiredGrammar | None:
    """Returns the grammar rules of tool calls, or None if calls need not be constrained.

    Calls are constrained if one is required, if a tool is `strict`, if parallel calls are disabled, or if the text
    itself has a grammar (`or_answer`).
    """
    tools = callable_tools(request)
    must_fit = is_call_forced(request) or any(tool.strict for tool in tools)
    if model.tool_format is None and must_fit:
        field = "tool_choice" if is_call_forced(request) else "tools"
        raise InvalidRequest(
            f"`{field}`: the tool call format of this model is unknown; set --tool-parser.", param=field
        )
    if model.tool_format is None or not (must_fit or (tools and (or_answer or request.parallel_tool_calls is False))):
        return None
    size, relaxed, ignored = 0, list[CallableTool](), list[str]()
    for tool in tools:
        field = _parameters_field(request, tool)
        size += len(_schema_grammar(tool.parameters or {}, field, strict=tool.strict).source)
        if size > grammar.MAX_GRAMMAR_BYTES:
            raise _grammar_error(field, grammar.too_large(size))
        unenforced = model.tool_format.unenforced(tool)
        if unenforced and tool.strict:
            raise _grammar_error(field, GrammarError(f"this model's tool calls do not support {'; '.join(unenforced)}"))
        ignored += [f"{tool.name}: {each}" for each in unenforced]
        if not tool.strict:
            parameters, dropped = without_unsupported_patterns(tool.parameters)
            ignored += [f"{tool.name}: {each}" for each in dropped if each not in unenforced]
            tool = replace(tool, parameters=parameters)
        relaxed.append(tool)
    parallel = request.parallel_tool_calls is not False
    return RequiredGrammar(model.tool_format.calls(relaxed, _terminals(model), parallel=parallel), "tools", ignored)


def is_call_forced(request: ChatRequest) -> bool:
    """Whether the output consists of reasoning and tool calls only."""
    return request.tool_choice == "required" or isinstance(request.tool_choice, NamedToolChoice)


def callable_tools(request: ChatRequest) -> list[CallableTool]:
    """Returns the tools that the output may call, as `tool_choice` selects them."""
    if request.tool_choice == "none":
        return []
    functions = [tool["function"] for tool in request.tools or ()]
    named = request.tool_choice.function.name if isinstance(request.tool_choice, NamedToolChoice) else None
    return [
        CallableTool(function["name"], function.get("parameters"), bool(function.get("strict")))
        for function in functions
        if named in (None, function["name"])
    ]


def _output_grammar(request: GenerationRequest) -> RequiredGrammar | None:
    """Returns the grammar of the output text, or None if no field requires one.

    Raises InvalidRequest if two fields require a grammar.
    """
    required: list[RequiredGrammar] = []
    format = request.response_format
    if isinstance(format, JsonObjectFormat):
        required.append(RequiredGrammar(grammar.json_object(), "response_format"))
    if isinstance(format, JsonSchemaFormat):
        schema = format.json_schema.schema
        field, strict = "response_format.json_schema.schema", bool(format.json_schema.strict)
        free = RequiredGrammar(grammar.json_object(), field)
        required.append(free if schema is None else _schema_grammar(schema, field, strict=strict))
    guided = StructuredOutputs(
        json=request.guided_json,
        regex=request.guided_regex,
        choice=request.guided_choice,
        grammar=request.guided_grammar,
    )
    required += _structured_grammars(guided, "guided_")
    if request.structured_outputs is not None:
        found = _structured_grammars(request.structured_outputs, "structured_outputs.")
        if not found:
            raise InvalidRequest("`structured_outputs` has no constraint.", param="structured_outputs")
        required += found
    if len(required) > 1:
        fields = " and ".join(f"`{each.field}`" for each in required)
        raise InvalidRequest(f"{fields} cannot be combined.", param=required[1].field)
    return required[0] if required else None


def _structured_grammars(constraints: StructuredOutputs, prefix: str) -> list[RequiredGrammar]:
    found: list[RequiredGrammar] = []
    if constraints.json is not None:
        schema = _schema(constraints.json, f"{prefix}json")
        found.append(_schema_grammar(schema, f"{prefix}json"))
    if constraints.regex is not None:
        found.append(RequiredGrammar(grammar.regex(constraints.regex), f"{prefix}regex"))
    if constraints.choice is not None:
        choices = " | ".join(quoted(choice) for choice in constraints.choice)
        found.append(RequiredGrammar(grammar.lark(f"start: {choices}"), f"{prefix}choice"))
    if constraints.grammar is not None:
        found.append(RequiredGrammar(grammar.lark(constraints.grammar), f"{prefix}grammar"))
    if constraints.json_object:
        found.append(RequiredGrammar(grammar.json_object(), f"{prefix}json_object"))
    return found


def _schema(given: dict[str, Any] | str, field: str) -> dict[str, Any] | bool:
    """Parses a schema given as text, which vLLM also accepts. Raises InvalidRequest."""
    if not isinstance(given, str):
        return given
    try:
        schema = json.loads(given)
    except ValueError as error:
        raise InvalidRequest(f"`{field}` is not JSON: {error}.", param=field) from error
    except RecursionError as error:
        raise InvalidRequest(f"`{field}` is nested too deeply.", param=field) from error
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"`{field}` is not a JSON schema.", param=field)
    return schema


def _check_compatible(request: GenerationRequest) -> None:
    """Raises InvalidRequest for `ignore_eos` and `min_tokens`, because the grammar decides where the output ends."""
    for field, value in (("ignore_eos", request.ignore_eos), ("min_tokens", request.min_tokens)):
        if value:
            raise InvalidRequest(f"`{field}` cannot be combined with structured output.", param=field)


def _schema_grammar(schema: Mapping[str, Any] | bool, field: str, *, strict: bool = True) -> RequiredGrammar:
    kept, dropped = (schema, []) if strict else without_unsupported_patterns(schema)
    try:
        return RequiredGrammar(grammar.json_schema(kept, strict=strict), field, dropped)
    except GrammarError as error:
        raise _grammar_error(field, error) from error


def _compile(model: ServedModel, request: GenerationRequest, required: RequiredGrammar) -> CompiledGrammar:
    try:
        return _compiled(model, request, required)
    except GrammarsExhausted as error:
        raise _busy(error) from error
    except GrammarError as error:
        raise _grammar_error(required.field, error) from error


def _compiled(model: ServedModel, request: GenerationRequest, required: RequiredGrammar) -> CompiledGrammar:
    compiled = model.grammars.compile(required.source, request.cache_salt or "", required.field)
    compiled.ignored = (*compiled.ignored, *required.ignored)
    return compiled


def _busy(error: GrammarsExhausted) -> GrammarsBusy:
    return GrammarsBusy(f"{error}.")


def _grammar_error(field: str, error: GrammarError) -> InvalidRequest:
    return InvalidRequest(f"`{field}` cannot be compiled: {error}.", param=field)


def _parameters_field(request: ChatRequest, tool: CallableTool) -> str:
    names = [given["function"]["name"] for given in request.tools or ()]
    return f"tools[{names.index(tool.name)}].function.parameters"


def _reasoning_rules(format: ReasoningFormat | None, prompt: str, terminal: MarkerTerminal) -> str:
    return NO_REASONING_RULES if format is None else format.rules(prompt, terminal)


def _text_or_calls_rules(format: ToolFormat | None, terminal: MarkerTerminal) -> Sequence[str]:
    """Returns the grammar rules of an output that is text or tool calls. Calls must match the tools' schemas."""
    begins = format.begins if format else ""
    if not begins:  # the format has no marker: a call is recognised by its first character
        first = re.escape(format.starts if format else "")
        return ["start: reasoning (opening TEXT | head calls)", rf"TEXT: /([^{first}\s](?s:.*))?/"]
    if terminal(begins) != quoted(begins):  # the marker is a special token, which text cannot contain
        choice = "(opening TEXT | head calls)" if format and format.stands_alone else "opening TEXT (head calls)?"
        return [f"start: reasoning {choice}", f"TEXT: {TEXT}"]
    pattern = re.sub(r"([\[\]|])", r"\\\1", begins)
    return [
        "start: reasoning (opening TEXT | before calls)",
        f"TEXT: {TEXT} & ~/(?s:.*){pattern}(?s:.*)/",
        f"before[suffix={quoted(begins)}]: {TEXT}",
    ]


def _terminals(model: ServedModel) -> MarkerTerminal:
    """Maps a marker to its Lark terminal: its token id if it is a special token, else its text."""

    def terminal(text: str) -> str:
        token_id = model.codec.special_token_id(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    return terminal
