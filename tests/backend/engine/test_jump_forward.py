"""Forced tokens are appended without a forward pass each, and every token is the same as with one step for each."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from backend.engine import grammar
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.grammar import GrammarCompiler
from backend.engine.grammar_positions import pack_position, skip_forced, unpack_position
from backend.engine.jump_forward import MIN_FORCED, forced_tokens
from backend.engine.outputs import FinishReason, StepOutput
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from tests.backend.checkpoints import VOCAB_SIZE
from tests.backend.engine.byte_tokenizer import EOS, tokenizer
from tests.backend.engine.test_grammar import PERSON, PROMPT

__all__ = ["tokenizer"]

REPORT = {
    "type": "object",
    "properties": {
        "temperature_in_degrees": {"type": "integer", "minimum": 0, "maximum": 99},
        "location": {"enum": ["Paris, France", "Parma, Italy"]},
    },
    "required": ["temperature_in_degrees", "location"],
    "additionalProperties": False,
}
SOURCES = {
    "report": grammar.json_schema(REPORT),
    "person": grammar.json_schema(PERSON),
    "regex": grammar.regex("(?:yes, certainly|no, never)!{3}[0-9]{2}"),
    "constant": grammar.regex("nothing else is possible"),
}


class StepByStep:
    """The same grammar without jump-forward: llguidance's mask for every single token."""

    error = ""
    forced: tuple[int, ...] = ()

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        self._matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), n_vocab=VOCAB_SIZE, eos_token=[EOS]), source)

    def is_ready(self, seconds: float = 0.0) -> bool:
        return True

    def fill_mask(self, address: int, num_bytes: int) -> str:
        ctypes.memmove(address, self._matcher.compute_bitmask(), num_bytes)
        return ""

    def accept(self, token_id: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer.to_str(), VOCAB_SIZE, [EOS])
    yield made
    made.close()


@pytest.fixture
def load(checkpoint_dir: Callable[[str], Path]) -> Callable[..., Engine]:
    def load(**options: Any) -> Engine:
        defaults: dict[str, Any] = {"num_blocks": 400, "block_size": 4, "num_threads": 1, "max_num_seqs": 8}
        return Engine.load(EngineConfig(model_dir=checkpoint_dir("llama"), **(defaults | options)))

    return load


def run(engine: Engine, requests: list[Request]) -> dict[str, list[StepOutput]]:
    outputs: dict[str, list[StepOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        for output in engine.step():
            outputs[output.request_id].append(output)
    engine.check_integrity()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    return outputs


def make_requests(make_grammar: Callable[[str], Any], **sampling: Any) -> list[Request]:
    given: dict[str, Any] = {"max_tokens": 200, "stop_token_ids": frozenset({EOS})} | sampling
    return [
        Request(f"{name} {temperature}", list(PROMPT), SamplingParams(temperature=temperature, seed=i, **given),
                grammar=make_grammar(source))
        for i, (name, source) in enumerate(SOURCES.items())
        for temperature in (0.0, 2.0)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"max_tokens": 11},
        {"min_tokens": 9},
        {"stop_token_ids": frozenset({EOS, 80})},
        {"logprobs": 2},
        {"logit_bias": {70: 3.0}},
    ],
    ids=str,
)
def test_tokens_are_those_of_single_steps(
    load: Callable[..., Engine], compiler: GrammarCompiler, tokenizer: Tokenizer, sampling: dict[str, Any]
) -> None:
    """With every seed and parameter, in small chunks and after preemptions, and wherever the output ends."""
    single = make_requests(lambda source: StepByStep(tokenizer, source), **sampling)
    expected = run(load(), single)
    for options in (
        {},
        {"max_num_batched_tokens": 9, "enable_prefix_caching": False},
        {"num_blocks": 220, "block_size": 1},
    ):
        requests = make_requests(lambda source: compiler.compile(source).start(), **sampling)
        outputs = run(load(**options), requests)
        for one, other in zip(single, requests, strict=True):
            name = one.request_id
            assert other.token_ids == one.token_ids, name
            assert other.finish_reason is one.finish_reason
            assert [token for output in outputs[name] for token in output.new_token_ids] == one.token_ids[len(PROMPT) :]
            if "logprobs" in sampling:
                chosen = [
                    [each.token_id for output in got for each in output.logprobs]
                    for got in (outputs[name], expected[name])
                ]
                assert chosen[0] == chosen[1] == one.token_ids[len(PROMPT) :]
                assert all(len(output.new_token_ids) == 1 for output in outputs[name]), "each needs its logits"


def test_forced_tokens_take_no_step_of_their_own(
    load: Callable[..., Engine], compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Whether a mask is ready in time depends on the machine, so the test waits for it."""
    engine = load()
    source = SOURCES["report"]
    request = Request(
        "r", list(PROMPT), SamplingParams(max_tokens=200, temperature=0.0, stop_token_ids=frozenset({EOS})),
        grammar=compiler.compile(source).start(),
    )  # fmt: skip
    engine.add(request)
    outputs: list[StepOutput] = []
    while engine.has_unfinished:
        assert request.grammar
        request.grammar.is_ready(60)
        outputs += engine.step()
    assert request.finish_reason is FinishReason.STOP
    text = tokenizer.decode(request.token_ids[len(PROMPT) : -1])
    assert json.loads(text)["location"] in ("Paris, France", "Parma, Italy")
    sizes = [len(output.new_token_ids) for output in outputs]
    assert sum(sizes) == len(text) + 1 == engine.stats().generation_tokens_total
    assert sizes[0] == len('{"temperature_in_degrees": '), "all that comes before the first choice"
    assert len(sizes) <= 10 < len(text) / 5
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_short_runs_are_not_worth_a_larger_step(compiler: GrammarCompiler) -> None:
    for length in (MIN_FORCED - 1, MIN_FORCED):
        matcher = compiler.compile(grammar.regex(f"a{{{length}}}[bc]")).start()
        request = Request("r", list(PROMPT), SamplingParams(max_tokens=9), grammar=matcher)
        assert len(matcher.forced) == length
        assert len(forced_tokens(request)) == (length if length >= MIN_FORCED else 0)


def id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None
    return found


def test_a_token_that_the_request_forbids_ends_it(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(grammar.regex("abc")).start()
    matcher.accept(id_of(tokenizer, "x"))
    assert matcher.is_ready()
    assert "only token" in matcher.error


def test_the_message_of_a_position(tokenizer: Tokenizer) -> None:
    tokens = LLTokenizer(tokenizer.to_str(), n_vocab=VOCAB_SIZE, eos_token=[EOS])
    matcher = LLMatcher(tokens, grammar.regex("abc[de]f"))
    forced, mask = skip_forced(matcher, 60)
    assert tokenizer.decode(forced) == "abc"
    size = VOCAB_SIZE // 8
    message = pack_position(forced, mask[:size]) + b"more"
    assert unpack_position(message, VOCAB_SIZE) == (tuple(forced), mask[:size], b"more")
    matcher.consume_token(id_of(tokenizer, "d"))
    forced, mask = skip_forced(matcher, 60)
    assert tokenizer.decode(forced) == "f", "not the token that ends the sequence"
    assert skip_forced(matcher, 60) == ([], mask)
