"""Grammars of whole outputs: the parsers can read everything that a grammar allows, in every format."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from backend.engine.grammar import CompiledGrammar, GrammarCompiler
from backend.engine.masks import MaskCollector
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.parsers import REASONING_FORMATS, TOOL_FORMATS
from backend.parsers.base import ContentText, ToolCallArguments, ToolCallStart
from backend.parsers.chained import ChainedParser
from backend.server.constraints import callable_tools, chat_constraint, is_constrained, relaxed_header
from backend.server.errors import InvalidRequest
from backend.server.model import ServedModel, load_model
from backend.server.request_body import decode_body
from backend.server.requests import ChatRequest
from backend.server.tokenizer import TextCodec
from tests.tool_calls import written

DEMO = Path("backend/demo_model/weights")
ZIP = {
    "type": "object",
    "properties": {"zip": {"type": "string", "pattern": "^[0-9]{4}$"}},
    "required": ["zip"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": ZIP, "strict": True}}
NOW = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
FORMATS = [(tools, reasoning) for tools in TOOL_FORMATS for reasoning in (None, "think")]


@pytest.fixture(scope="module")
def demo() -> ServedModel:
    return load_model(DEMO, "m", "m", 512)


def make_model(demo: ServedModel, tools: str, reasoning: str | None) -> ServedModel:
    return replace(
        demo,
        tool_format=TOOL_FORMATS[tools],
        reasoning_format=REASONING_FORMATS[reasoning] if reasoning else None,
    )


def make_request(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "Rain?"}], "tools": [NOW, WEATHER]} | fields
    request = decode_body(json.dumps(body).encode(), ChatRequest)
    request.check()
    assert is_constrained(request)
    return request


def random_walk(model: ServedModel, grammar: CompiledGrammar, seed: int) -> str | None:
    """Generates random tokens that the grammar allows. None if the output does not end within 300 tokens."""
    rng, walk, tokens = random.Random(seed), grammar.start(), list[int]()
    request = Request("r", [0], SamplingParams(max_tokens=1), grammar=walk)
    masks = MaskCollector(model.vocab_size, torch.device("cpu"))
    for _ in range(300):
        walk.is_ready(60)
        filled = masks.collect([request])
        assert filled is not None
        words = filled.bitmask[0].tolist()
        allowed = [token for token in range(model.vocab_size) if words[token // 32] >> (token % 32) & 1]
        ends = model.eos_token_ids & set(allowed)
        if ends and (len(ends) == len(allowed) or rng.random() < 0.3):
            return model.codec.decode(tokens, skip_special_tokens=False)
        # Without a preference for end tokens, reasoning and text would hardly ever end.
        tokens.append(rng.choice(sorted(set(allowed) - ends)))
        walk.accept(tokens[-1])
    return None


def accepts(model: ServedModel, grammar: CompiledGrammar, text: str) -> bool:
    """Whether the grammar accepts the text as a complete output."""
    tokens = model.codec.encode(text, add_special_tokens=False)
    return accepts_tokens(model, grammar, tokens)


def accepts_tokens(model: ServedModel, grammar: CompiledGrammar, tokens: list[int], *, complete: bool = True) -> bool:
    """Whether the grammar allows each of the tokens and, if `complete`, the output's end after them."""
    matcher = grammar.start()
    mask = np.zeros(-(-model.vocab_size // 32), dtype=np.int32)
    for token in (*tokens, *([min(model.eos_token_ids)] if complete else ())):
        assert matcher.fill_mask(mask.ctypes.data, mask.nbytes) == ""
        if not mask[token // 32] >> (token % 32) & 1:
            return False
        matcher.accept(token)
    return True


@pytest.mark.parametrize(("tools", "reasoning"), FORMATS)
@pytest.mark.parametrize("parallel", [True, False])
def test_every_output_of_a_required_call_parses_as_calls(
    demo: ServedModel, tools: str, reasoning: str | None, parallel: bool
) -> None:
    model = make_model(demo, tools, reasoning)
    request = make_request(tool_choice="required", parallel_tool_calls=parallel)
    prompt = "<think>\n\n</think>\n" if reasoning else ""
    grammar = chat_constraint(model, request, prompt)
    assert grammar is not None
    counts = set()
    for seed in range(12):
        text = random_walk(model, grammar, seed)
        if text is None:
            continue
        assert model.tool_format is not None
        parser = ChainedParser(None, model.tool_format.parser(callable_tools(request)))
        events = parser.push(text) + parser.finish()
        assert not [event for event in events if isinstance(event, ContentText)]
        calls = [event for event in events if isinstance(event, ToolCallStart)]
        counts.add(len(calls))
        for call in calls:
            pieces = [e.text for e in events if isinstance(e, ToolCallArguments) and e.index == call.index]
            arguments = json.loads("".join(pieces))
            jsonschema_rs.validate(ZIP if call.name == "weather" else {"type": "object"}, arguments)
    assert counts
    assert 0 not in counts
    assert parallel or counts == {1}


@pytest.mark.parametrize(("tools", "reasoning"), FORMATS)
def test_reasoning_can_precede_constrained_output(demo: ServedModel, tools: str, reasoning: str | None) -> None:
    model = make_model(demo, tools, reasoning)
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": ZIP}}
    request = make_request(tools=None, response_format=format)
    answer = '{"zip": "8004"}'
    fresh = chat_constraint(model, request, "<|im_start|>assistant\n")
    begun = chat_constraint(model, request, "<|im_start|>assistant\n<think>\n")
    over = chat_constraint(model, request, "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert fresh and begun and over
    thought = "It is {near} </thi.\n</think>\n\n"
    assert accepts(model, fresh, answer)
    assert accepts(model, fresh, f"<think>{thought}{answer}") is (reasoning is not None)
    assert accepts(model, begun, f"{thought}{answer}") is (reasoning is not None)
    assert accepts(model, begun, answer) is (reasoning is None)
    assert accepts(model, over, answer)
    assert not accepts(model, over, f"<think>{thought}{answer}")
    assert not accepts(model, fresh, answer + "!")


@pytest.mark.parametrize(("tools", "reasoning"), FORMATS)
def test_a_strict_tool_is_called_by_its_schema_or_not_at_all(
    demo: ServedModel, tools: str, reasoning: str | None
) -> None:
    model = make_model(demo, tools, reasoning)
    grammar = chat_constraint(model, make_request(tool_choice="auto"), "")
    assert grammar is not None
    before = "" if not TOOL_FORMATS[tools].begins else "Let me see [1] <b>.\n"
    assert accepts(model, grammar, "It rains, {yes}. 1 < 2")
    assert accepts(model, grammar, before + written(tools, ("weather", '{"zip": "8004"}')))
    assert not accepts(model, grammar, before + written(tools, ("weather", '{"zip": "80"}')))
    assert not accepts(model, grammar, before + written(tools, ("weather", "{}")))
    if reasoning:
        assert accepts(model, grammar, "<think>Hm.</think>\n\n" + written(tools, ("weather", '{"zip": "8004"}')))


@pytest.mark.parametrize(("tools", "reasoning"), FORMATS)
@pytest.mark.parametrize("strict", [True, False])
def test_output_is_in_the_required_format_or_a_call(
    demo: ServedModel, tools: str, reasoning: str | None, strict: bool
) -> None:
    model = make_model(demo, tools, reasoning)
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["sun", "rain"]}}}
    weather = {"type": "function", "function": {**WEATHER["function"], "strict": strict}}
    grammar = chat_constraint(model, make_request(response_format=format, tools=[weather]), "")
    assert grammar is not None
    assert accepts(model, grammar, '"rain"')
    assert accepts(model, grammar, written(tools, ("weather", '{"zip": "8004"}')))
    assert not accepts(model, grammar, "rain")


def test_a_marker_that_is_a_special_token_matches_only_that_token(demo: ServedModel) -> None:
    tokenizer = Tokenizer.from_str(demo.codec.tokenizer.to_str())
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    size = tokenizer.get_vocab_size()
    grammars = GrammarCompiler(tokenizer.to_str(), size, demo.eos_token_ids)
    model = replace(
        make_model(demo, "mistral", None), codec=TextCodec(tokenizer, {}), vocab_size=size, grammars=grammars
    )
    text = written("mistral", ("weather", '{"zip": "8004"}'))
    assert (
        model.codec.special_token_id("[TOOL_CALLS]")
        == size - 1
        == model.codec.encode(text, add_special_tokens=False)[0]
    )
    for choice in ("required", "auto"):
        grammar = chat_constraint(model, make_request(tool_choice=choice), "")
        assert grammar is not None
        assert accepts(model, grammar, text)
        spelled = demo.codec.encode(text, add_special_tokens=False)
        # Spelled as text, the marker is ordinary content, and what follows is not a call.
        assert accepts_tokens(model, grammar, spelled, complete=False) is (choice == "auto")


@pytest.mark.parametrize("tools", [name for name, each in TOOL_FORMATS.items() if each.begins and name != "harmony"])
def test_calls_whose_markers_are_special_tokens(demo: ServedModel, tools: str) -> None:
    tokenizer = Tokenizer.from_str(demo.codec.tokenizer.to_str())
    tokenizer.add_special_tokens([*TOOL_FORMATS[tools].markers])
    size = tokenizer.get_vocab_size()
    grammars = GrammarCompiler(tokenizer.to_str(), size, demo.eos_token_ids)
    model = replace(make_model(demo, tools, None), codec=TextCodec(tokenizer, {}), vocab_size=size, grammars=grammars)
    for choice in ("required", "auto"):
        grammar = chat_constraint(model, make_request(tool_choice=choice), "")
        assert grammar is not None
        assert accepts(model, grammar, written(tools, ("now", "{}"), ("weather", '{"zip": "8004"}')))
        assert not accepts(model, grammar, written(tools, ("weather", '{"zip": "80"}')))
        assert accepts(model, grammar, "It rains.") is (choice == "auto")


TYPED = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "kind": {"enum": ["a/b", "c.d"]},
        "count": {"$ref": "#/$defs/count"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["count", "kind"],
    "$defs": {"count": {"type": "integer", "minimum": 3}},
}


@pytest.mark.parametrize("tools", ["qwen3_coder", "glm", "pythonic"])
def test_formats_without_json_follow_the_types_of_a_schema(demo: ServedModel, tools: str) -> None:
    model = make_model(demo, tools, None)
    function = {"name": "typed", "parameters": TYPED, "strict": True}
    request = make_request(tools=[{"type": "function", "function": function}], tool_choice="required")
    grammar = chat_constraint(model, request, "")
    assert grammar is not None
    first = {"kind": "a/b", "count": 3}
    given = {"text": 'two\n"lines" </p>', **first} if tools != "pythonic" else {**first, "tags": ["x", "y"]}
    for arguments in (first, given):
        assert accepts(model, grammar, written(tools, ("typed", json.dumps(arguments))))
    for wrong in ({"kind": "axb", "count": 3}, {"kind": "c.d", "count": 2}, {"kind": "c.d"}):
        assert not accepts(model, grammar, written(tools, ("typed", json.dumps(wrong))))
    for seed in range(8):
        text = random_walk(model, grammar, seed)
        if text is not None:
            assert model.tool_format is not None
            parser = model.tool_format.parser(callable_tools(request))
            events = parser.push(text) + parser.finish()
            arguments = json.loads("".join(e.text for e in events if isinstance(e, ToolCallArguments) and e.index == 0))
            jsonschema_rs.validate(TYPED, arguments)


NO_JSON = ["qwen3_coder", "glm", "pythonic"]


def called(parameters: dict[str, Any], *, strict: bool) -> ChatRequest:
    function = {"name": "typed", "parameters": {"type": "object", **parameters}, "strict": strict}
    return make_request(tools=[{"type": "function", "function": function}], tool_choice="required")


@pytest.mark.parametrize("tools", NO_JSON)
@pytest.mark.parametrize(
    ("schema", "word", "value"),
    [
        ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}}, "contains", [2]),
        ({"type": "string", "pattern": "^(?=a)b"}, "pattern", "anything"),
        ({"type": "string", "format": "color"}, "color|format", "red"),
        ({"not": {"const": "x"}}, "not", "x"),
    ],
)
def test_formats_without_json_relax_what_they_cannot_enforce_unless_it_is_strict(
    demo: ServedModel, tools: str, schema: dict[str, Any], word: str, value: Any
) -> None:
    model = make_model(demo, tools, None)
    parameters = {"properties": {"x": schema}, "required": ["x"]}
    relaxed = chat_constraint(model, called(parameters, strict=False), "")
    assert relaxed is not None
    assert accepts(model, relaxed, written(tools, ("typed", json.dumps({"x": value}))))
    assert not accepts(model, relaxed, written(tools, ("typed", "{}")))
    assert re.search(word, relaxed_header(relaxed)["x-schema-relaxed"])
    with pytest.raises(InvalidRequest, match=f"{word}|look-around") as caught:
        chat_constraint(model, called(parameters, strict=True), "")
    assert caught.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize("tools", NO_JSON)
def test_formats_without_json_refuse_a_strict_schema_that_they_cannot_express(demo: ServedModel, tools: str) -> None:
    model = make_model(demo, tools, None)
    parameters = {"properties": {"x": {"type": "integer"}}, "minProperties": 1}
    relaxed = chat_constraint(model, called(parameters, strict=False), "")
    assert relaxed is not None and relaxed_header(relaxed) == {"x-schema-relaxed": "tools: typed: minProperties"}
    with pytest.raises(InvalidRequest, match="minProperties"):
        chat_constraint(model, called(parameters, strict=True), "")


def test_json_relaxes_patterns_that_no_grammar_can_enforce(demo: ServedModel) -> None:
    schema = {"type": "object", "properties": {"pattern": {"type": "string", "pattern": r"^(a)\1$"}}}
    for strict in (False, True):
        format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
        request = make_request(tools=None, response_format=format)
        if strict:
            with pytest.raises(InvalidRequest, match="regular expression, backreferences are not supported"):
                chat_constraint(demo, request, "")
            continue
        grammar = chat_constraint(demo, request, "")
        assert grammar is not None and accepts(demo, grammar, '{"pattern": "ab"}')
        assert relaxed_header(grammar) == {"x-schema-relaxed": "response_format.json_schema.schema: pattern.pattern"}


STRINGS = [
    ({"type": "string", "format": "date"}, ["2026-02-28", "2024-12-31"], ["2026-02-31", "today"]),
    ({"type": "string", "format": "date-time"}, ["2026-02-28T10:00:00Z", "2026-01-01T23:59:59.5+02:00"], ["2026"]),
    ({"type": "string", "format": "email"}, ["a.b@c.org"], ["a b@c.org", ".a@b.c"]),
    ({"type": "string", "format": "ipv4"}, ["10.0.0.255"], ["10.0.0.256"]),
    ({"type": "string", "format": "ipv6"}, ["::1", "1:2:3:4:5:6:7:8", "fe80::1"], ["1:2", "1::2::3"]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    ({"type": "string", "format": "hostname"}, ["a-b.c"], ["-a"]),
    ({"type": "string", "format": "duration"}, ["P3W", "PT5M", "P1DT2H"], ["3 days", "P"]),
    ({"type": "string", "format": "time"}, ["10:00:00Z"], ["10:00"]),
    ({"anyOf": [{"type": "string", "enum": ["a/b", "c"]}, {"type": "null"}]}, ["a/b", None], ["d", "None"]),
    ({"type": ["string", "null"], "pattern": "^[0-9]+$"}, ["12", None], ["x"]),
    ({"type": ["string", "integer"], "pattern": "^a$"}, ["a", 5], ["b"]),
    ({"$ref": "#/$defs/kind"}, ["sun"], ["moon"]),
    ({"allOf": [{"$ref": "#/$defs/kind"}], "description": "x"}, ["sun"], ["moon"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), STRINGS)
def test_texts_follow_a_strict_schema(
    demo: ServedModel, schema: dict[str, Any], good: list[Any], bad: list[Any]
) -> None:
    """The values are right by an independent validator, too."""
    model = make_model(demo, "qwen3_coder", None)
    parameters = {
        "properties": {"x": schema},
        "required": ["x"],
        "$defs": {"kind": {"type": "string", "enum": ["sun"]}},
    }
    grammar = chat_constraint(model, called(parameters, strict=True), "")
    assert grammar is not None and not grammar.ignored
    validator = jsonschema_rs.validator_for({"type": "object", **parameters}, validate_formats=True)
    for value in (*good, *bad):
        assert accepts(model, grammar, written("qwen3_coder", ("typed", json.dumps({"x": value})))) is (value in good)
        assert validator.is_valid({"x": value}) is (value in good)


def test_a_reference_at_the_top_of_a_tools_schema(demo: ServedModel) -> None:
    inner = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    for tools in NO_JSON:
        model = make_model(demo, tools, None)
        grammar = chat_constraint(model, called({"$ref": "#/$defs/a", "$defs": {"a": inner}}, strict=True), "")
        assert grammar is not None
        assert accepts(model, grammar, written(tools, ("typed", '{"x": 5}')))
        assert not accepts(model, grammar, written(tools, ("typed", "{}")))


def test_channels_of_gpt_oss(demo: ServedModel) -> None:
    tokenizer = Tokenizer.from_str(demo.codec.tokenizer.to_str())
    tokenizer.add_special_tokens([*TOOL_FORMATS["harmony"].markers])
    size = tokenizer.get_vocab_size()
    model = replace(
        make_model(demo, "harmony", "harmony"),
        codec=TextCodec(tokenizer, {}),
        vocab_size=size,
        grammars=GrammarCompiler(tokenizer.to_str(), size, demo.eos_token_ids),
    )
    thought, final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", "<|channel|>final<|message|>"
    call, wrong = (written("harmony", ("weather", arguments)) for arguments in ('{"zip": "8004"}', "{}"))
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["sun", "rain"]}}}
    # Request fields, and whether the output can be a call, a text, and a text in the required format.
    for fields, allowed in (
        ({"tool_choice": "required"}, (True, False, False)),
        ({"tool_choice": "auto"}, (True, True, True)),
        ({"response_format": format}, (True, False, True)),
        ({"response_format": format, "tools": None}, (False, False, True)),
    ):
        grammar = chat_constraint(model, make_request(**fields), "<|start|>assistant")
        assert grammar is not None
        for before in ("", thought):
            outputs = (call, f"{final}rain", f'{final}"rain"')
            assert tuple(accepts(model, grammar, before + text) for text in outputs) == allowed
            assert not accepts(model, grammar, before + wrong)
        assert not accepts(model, grammar, thought + thought)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER]}, "tools"),
        ({"tools": [NOW], "parallel_tool_calls": False}, None),
    ],
)
def test_a_model_without_a_known_tool_format_is_not_forced_to_call(
    demo: ServedModel, fields: dict[str, Any], param: str | None
) -> None:
    model = replace(demo, tool_format=None)
    if param is None:  # calls that are not parsed need no limit on their number
        assert chat_constraint(model, make_request(**fields), "") is None
        return
    with pytest.raises(InvalidRequest, match="--tool-parser") as caught:
        chat_constraint(model, make_request(**fields), "")
    assert caught.value.param == param
