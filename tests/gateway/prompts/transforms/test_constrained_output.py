"""Constrained output is the same for both forms of a schema: the engine allows the same tokens at each step."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine import grammar
from backend.engine.grammar import GrammarCompiler, GrammarMatcher
from gateway.prompts.transforms import VERSION, SharedDecisions, TransformPipeline, TransformPlan
from tests.gateway.prompts.transforms.dialects import DEMO_MODEL
from tests.gateway.prompts.transforms.requests import written
from tests.gateway.prompts.transforms.schemas import object_schema, reordered, without_order
from tests.gateway.prompts.transforms.test_promises import canonical

EOS = 0
MAX_TOKENS = 200  # of one answer
TOKENIZER_JSON = (DEMO_MODEL / "weights" / "tokenizer.json").read_text("utf-8")
VOCABULARY = len(json.loads(TOKENIZER_JSON)["model"]["vocab"])


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER_JSON, VOCABULARY, [EOS])


def sent(*schemas: Any, plan: TransformPlan | None = None) -> list[Any]:
    """The schemas that a deployment gets, of consecutive requests."""
    pipeline = TransformPipeline(SharedDecisions())
    forms = []
    for schema in schemas:
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        }
        form = json.loads(canonical(written(body, 0), plan or TransformPlan(VERSION, "safe"), pipeline))
        forms.append(form["response_format"]["json_schema"]["schema"])
    return forms


def allowed(matcher: GrammarMatcher) -> list[int]:
    mask = np.zeros(-(-VOCABULARY // 32), dtype=np.int32)
    error = matcher.fill_mask(mask.ctypes.data, mask.nbytes)
    assert not error, error
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCABULARY]
    return [int(token) for token in np.flatnonzero(bits)]


def first_difference(compiler: GrammarCompiler, one: Any, other: Any, random: Random) -> int | None:
    """The step of a random answer at which two schemas allow different tokens; None if there is none."""
    matchers = [compiler.compile(grammar.json_schema(schema)).start() for schema in (one, other)]
    for step in range(MAX_TOKENS):
        tokens = [allowed(matcher) for matcher in matchers]
        if tokens[0] != tokens[1]:
            return step
        token = random.choice(tokens[0])
        if token == EOS:
            return None
        for matcher in matchers:
            matcher.accept(token)
    return None


@given(random=st.integers(0, 2**32 - 1).map(Random))
@settings(max_examples=60)
def test_order_memo_keeps_the_grammar(compiler: GrammarCompiler, random: Random) -> None:
    first = {"name": "n", "schema": object_schema(random)}["schema"]
    second = reordered({"schema": first}, random)["schema"]
    form = sent(first, second)[1]
    assert json.dumps(form) == json.dumps(first), "the first form replaces the second"
    assert first_difference(compiler, second, form, random) is None


TEXT = {"type": "string", "maxLength": 2}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(
            {"type": "object", "properties": {"reasoning": TEXT, "answer": TEXT}, "required": ["reasoning", "answer"]},
            {"type": "object", "properties": {"answer": TEXT, "reasoning": TEXT}, "required": ["reasoning", "answer"]},
            id="properties",
        ),
        pytest.param(
            {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": TEXT, "b": TEXT}, "required": ["a", "b"]}}},
            {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"b": TEXT, "a": TEXT}, "required": ["a", "b"]}}},
            id="properties of a definition",
        ),
        pytest.param(
            {"type": "object", "required": ["a", "b"], "additionalProperties": TEXT},
            {"type": "object", "required": ["b", "a"], "additionalProperties": TEXT},
            id="required names without properties",
        ),
        pytest.param({"const": {"a": 1, "b": 2}}, {"const": {"b": 2, "a": 1}}, id="const"),
        pytest.param({"enum": [{"a": 1, "b": 2}]}, {"enum": [{"b": 2, "a": 1}]}, id="enum"),
    ],
)
def test_an_order_that_the_engine_enforces_is_kept(compiler: GrammarCompiler, one: Any, other: Any) -> None:
    assert any(first_difference(compiler, one, other, Random(seed)) is not None for seed in range(20))
    assert json.dumps(sent(one, other)) == json.dumps([one, other])


def test_property_order_changes_answers(compiler: GrammarCompiler) -> None:
    """So the policy must name it."""
    one, other = (
        {"type": "object", "properties": dict.fromkeys(names, TEXT), "required": ["a", "b"]} for names in ("ab", "ba")
    )
    form = sent(one, other, plan=TransformPlan(VERSION, "full", ("property_order",)))[1]
    assert first_difference(compiler, other, form, Random(1)) is not None


@pytest.mark.parametrize("engine", ["xgrammar", "outlines_core"])
def test_the_grammars_of_other_engines(engine: str) -> None:
    """vLLM's and SGLang's xgrammar, and outlines-core. Skipped unless they are installed."""
    library = pytest.importorskip(engine)

    def compiled(schema: Any) -> str:
        source = json.dumps(schema)
        if engine == "xgrammar":
            return str(library.Grammar.from_json_schema(source))
        return str(pytest.importorskip("outlines_core.json_schema").build_regex_from_schema(source))

    for seed in range(100):
        random = Random(seed)
        schema = object_schema(random)
        assert compiled(reordered({"schema": schema}, random)["schema"]) == compiled(schema)
        shuffled = without_order(schema, random)
        assert (compiled(shuffled) == compiled(schema)) is (json.dumps(shuffled) == json.dumps(schema))
