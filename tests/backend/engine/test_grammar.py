"""Structured output: it parses and validates whatever the model prefers, and does not depend on the batch."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from backend.engine import grammar
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.grammar import GrammarCompiler, GrammarError
from backend.engine.masks import MaskCollector
from backend.engine.outputs import FinishReason
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from tests.backend.checkpoints import VOCAB_SIZE
from tests.backend.engine.byte_tokenizer import EOS, compiler, tokenizer

__all__ = ["compiler", "tokenizer"]  # fixtures

PROMPT = [7, 99, 13, 7]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{4}$"}},
            "additionalProperties": False,
        }
    },
}


@pytest.fixture
def load(checkpoint_dir: Callable[[str], Path]) -> Callable[..., Engine]:
    def load(**options: Any) -> Engine:
        defaults: dict[str, Any] = {"num_blocks": 400, "block_size": 4, "num_threads": 1, "max_num_seqs": 8}
        return Engine.load(EngineConfig(model_dir=checkpoint_dir("llama"), **(defaults | options)))

    return load


def make_request(
    name: str, compiler: GrammarCompiler, source: str | None, seed: int = 0, max_tokens: int = 200, **sampling: Any
) -> Request:
    wanted = SamplingParams(max_tokens=max_tokens, seed=seed, stop_token_ids=frozenset({EOS}), **sampling)
    return Request(name, list(PROMPT), wanted, grammar=compiler.compile(source).start() if source else None)


def run(engine: Engine, requests: list[Request]) -> list[Request]:
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        engine.step()
    return requests


def text_of(tokenizer: Tokenizer, request: Request) -> str:
    assert request.finish_reason is FinishReason.STOP
    return str(tokenizer.decode(request.token_ids[len(PROMPT) : -1]))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_json_follows_its_schema(
    load: Callable[..., Engine], compiler: GrammarCompiler, tokenizer: Tokenizer, temperature: float
) -> None:
    source = grammar.json_schema(PERSON)
    requests = [make_request(f"r{i}", compiler, source, seed=i, temperature=temperature) for i in range(8)]
    texts = [text_of(tokenizer, request) for request in run(load(), requests)]
    for text in texts:
        jsonschema_rs.validate(PERSON, json.loads(text))
    assert len(set(texts)) == 1 if temperature == 0.0 else len(set(texts)) > 3


def test_tokens_do_not_depend_on_the_batch_on_chunks_or_on_preemption(
    load: Callable[..., Engine], compiler: GrammarCompiler
) -> None:
    sources = [grammar.json_schema(PERSON), None, grammar.regex("[a-f]{12}(xy)+"), grammar.json_schema(PERSON), None]

    def requests() -> list[Request]:
        return [
            make_request(f"r{i}", compiler, source, seed=i, max_tokens=60, repetition_penalty=1.1)
            for i, source in enumerate(sources)
        ]

    alone = [run(load(), [request])[0].token_ids for request in requests()]
    cramped = load(num_blocks=80, block_size=1)
    for engine in (load(), load(max_num_batched_tokens=8, enable_prefix_caching=False), cramped):
        assert [request.token_ids for request in run(engine, requests())] == alone
    assert cramped.stats().preemptions_total > 2


def test_a_regular_expression_and_a_lark_grammar(
    load: Callable[..., Engine], compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    pattern = r"(?:yes|no), [0-9]{2,4}!"
    sums = 'start: term ("+" term){1,3}\nterm: /[0-9]/ | "(" /[0-9]/ "*" /[0-9]/ ")"\n'
    by_regex, by_lark = run(
        load(),
        [
            make_request("r", compiler, grammar.regex(pattern)),
            make_request("l", compiler, grammar.lark(sums), temperature=0.5, seed=3, max_tokens=400),
        ],
    )
    assert re.fullmatch(pattern, text_of(tokenizer, by_regex))
    assert re.fullmatch(r"(?:\d|\(\d\*\d\))(?:\+(?:\d|\(\d\*\d\))){1,3}", text_of(tokenizer, by_lark))


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer"},
            {"type": "string", "maxLength": 3},
            {"enum": ["x", 1, None]},
            {"type": "number", "minimum": 0, "maximum": 9},
        ]
    ),
    lambda inner: (
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3))
        | st.builds(
            lambda properties, required: {
                "type": "object",
                "properties": properties,
                "required": [name for name in properties if name in required],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b c", "é"]), inner, max_size=3),
            st.sets(st.sampled_from(["a", "b c", "é"])),
        )
        | st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=5,
)


@settings(max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_random_output_within_the_masks_validates(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], seed: int
) -> None:
    """Without a model: tokens are drawn uniformly from those that the mask allows."""
    rng = random.Random(seed)
    matcher = compiler.compile(grammar.json_schema(schema)).start()
    request = Request("r", [0], SamplingParams(max_tokens=1), grammar=matcher)
    masks = MaskCollector(VOCAB_SIZE, torch.device("cpu"))
    tokens: list[int] = []
    while True:
        assert matcher.is_ready(60)
        filled = masks.collect([request])
        assert filled is not None
        assert filled.errors == {}
        words = filled.bitmask[0].tolist()
        allowed = [token for token in range(VOCAB_SIZE) if words[token // 32] >> (token % 32) & 1]
        token = EOS if EOS in allowed else rng.choice(allowed)
        if token == EOS:
            break
        matcher.accept(token)
        tokens.append(token)
    jsonschema_rs.validate(schema, json.loads(tokenizer.decode(tokens)))


@pytest.mark.parametrize(
    "source",
    [
        grammar.json_schema({"type": "no such type"}),
        grammar.json_schema({"$ref": "#/nowhere"}),
        grammar.json_schema({"contains": {"type": "integer"}}),  # an unsupported keyword must not be ignored silently
        grammar.regex("(a"),
        grammar.lark("start: nothing"),
    ],
)
def test_a_grammar_that_cannot_be_enforced_is_rejected(compiler: GrammarCompiler, source: str) -> None:
    with pytest.raises(GrammarError):
        compiler.compile(source)


def test_a_failing_grammar_ends_only_its_own_request(load: Callable[..., Engine], compiler: GrammarCompiler) -> None:
    class Broken:
        error = "too complex"
        forced: tuple[int, ...] = ()

        def is_ready(self, seconds: float = 0.0) -> bool:
            return True

        def fill_mask(self, address: int, num_bytes: int) -> str:
            return self.error

        def accept(self, token_id: int) -> None:
            raise AssertionError("nothing was allowed")

    engine = load()
    broken = make_request("broken", compiler, None)
    broken.grammar = Broken()
    other = make_request("other", compiler, grammar.regex("[a-c]{3}"))
    engine.add(broken)
    engine.add(other)
    (failed,) = (output for output in engine.step() if output.finish_reason)
    assert (failed.request_id, failed.finish_reason, failed.error) == ("broken", FinishReason.ERROR, "too complex")
    while engine.has_unfinished:
        engine.step()
    assert other.finish_reason is FinishReason.STOP


class Delayed:
    """A grammar whose masks come only when the test says so."""

    error = ""
    forced: tuple[int, ...] = ()

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.matcher = compiler.compile(grammar.regex("[a-c]{3}")).start()
        self.is_released = True

    def is_ready(self, seconds: float = 0.0) -> bool:
        return self.is_released and self.matcher.is_ready(60)

    def fill_mask(self, address: int, num_bytes: int) -> str:
        assert self.is_released
        return self.matcher.fill_mask(address, num_bytes)

    def accept(self, token_id: int) -> None:
        self.is_released = False
        self.matcher.accept(token_id)


def test_a_late_mask_delays_only_its_own_request(load: Callable[..., Engine], compiler: GrammarCompiler) -> None:
    (expected,) = run(load(), [make_request("r", compiler, grammar.regex("[a-c]{3}"))])
    engine = load()
    late = make_request("late", compiler, None)
    delayed = Delayed(compiler)
    late.grammar = delayed
    other = make_request("other", compiler, None, max_tokens=30)
    engine.add(late)
    engine.add(other)
    engine.step()  # the first masks are known
    assert (late.num_output_tokens, other.num_output_tokens) == (1, 1)
    engine.step()  # computed, but no token could be sampled
    assert (late.num_output_tokens, late.mask_is_late, other.num_output_tokens) == (1, True, 2)
    engine.step()  # not in the plan
    assert (late.num_computed_tokens, other.num_output_tokens) == (len(PROMPT), 3)
    while engine.has_unfinished:
        delayed.is_released = True
        engine.step()
    assert late.token_ids == expected.token_ids


def test_an_engine_whose_requests_all_wait_for_masks(load: Callable[..., Engine], compiler: GrammarCompiler) -> None:
    engine = load()
    late = make_request("late", compiler, None)
    delayed = late.grammar = Delayed(compiler)
    engine.add(late)
    engine.step()
    engine.step()
    launches: list[str] = []
    assert engine.step(lambda: launches.append("outputs of the previous step are handed out")) == []
    assert launches
    delayed.is_released = True
    assert engine.step()
