"""Drafts change no answer: whatever they are and whatever happens meanwhile, every token is the same as without.

The fixtures and requests are those of tests/backend/engine/test_invariance.py, whose engines do not draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.outputs import TokenLogprob
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.engine.speculation.base import Drafter, DraftRequest
from backend.engine.speculation.draft_length import AdaptiveDraftLength
from backend.engine.speculation.speculator import Speculator
from tests.backend.engine.test_invariance import NUM_TOKENS, PROMPTS, make_requests, run


class AlwaysDraft(AdaptiveDraftLength):
    """Drafts as many tokens as possible, whatever it costs."""

    def num_drafts(self, requests: Sequence[Request], most: int) -> list[int]:
        return [most] * len(requests)


class KnownAnswers(Drafter):
    """Knows the answers, and drafts a wrong token now and then."""

    def __init__(self, answers: dict[str, list[int]], reliability: float) -> None:
        self._answers = answers
        self._reliability = reliability
        self._random = Random(0)

    def draft(self, wanted: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        return [self._draft(each.request, self._random.randint(0, each.num_tokens)) for each in wanted]

    def _draft(self, request: Request, count: int) -> tuple[int, ...]:
        rest = self._answers[request.request_id][request.num_output_tokens :][:count]
        return tuple(t if self._random.random() < self._reliability else self._random.randrange(256) for t in rest)


@pytest.fixture
def load(checkpoint_dir: Callable[[str], Path]) -> Callable[..., Engine]:
    def load(speculation: str = "none", draft: str | None = None, **options: Any) -> Engine:
        defaults: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "num_threads": 1, "max_num_seqs": 8}
        draft_dir = checkpoint_dir(draft) if draft else None
        config = EngineConfig(
            model_dir=checkpoint_dir("llama"),
            speculation=speculation,
            draft_model_dir=draft_dir,
            **(defaults | options),
        )
        engine = Engine.load(config)
        engine.speculator._draft_length = AlwaysDraft()
        return engine

    return load


@pytest.fixture
def alone(load: Callable[..., Engine]) -> list[list[int]]:
    return [run(load(enable_prefix_caching=False), [r])[0] for r in make_requests()]


@pytest.fixture
def drafting(load: Callable[..., Engine], alone: list[list[int]]) -> Callable[..., Engine]:
    """An engine whose drafts are mostly accepted."""

    def load_drafting(reliability: float = 0.8, **options: Any) -> Engine:
        engine = load(**options)
        answers = {f"r{i}": tokens for i, tokens in enumerate(alone)}
        engine.speculator = Speculator(engine.scheduler, KnownAnswers(answers, reliability), 5)
        engine.speculator._draft_length = AlwaysDraft()
        return engine

    return load_drafting


def samplings() -> list[SamplingParams]:
    return [request.sampling for request in make_requests()]


def accepted(engine: Engine) -> int:
    return sum(engine.stats().accepted_tokens_total)


@pytest.mark.parametrize("reliability", [0.0, 0.5, 0.9, 1.0])
def test_whatever_is_drafted(drafting: Callable[..., Engine], alone: list[list[int]], reliability: float) -> None:
    engine = drafting(reliability)
    assert run(engine, make_requests()) == alone
    stats = engine.stats()
    assert stats.draft_tokens_total >= 50
    assert accepted(engine) <= 5 if reliability == 0.0 else accepted(engine) >= 20 * reliability
    assert (accepted(engine) == stats.draft_tokens_total) == (reliability == 1.0)
    assert stats.generation_tokens_total == len(alone) * NUM_TOKENS


@pytest.mark.parametrize("budget", [8, 16, 31])
def test_in_steps_of_any_size(drafting: Callable[..., Engine], alone: list[list[int]], budget: int) -> None:
    engine = drafting(max_num_batched_tokens=budget, enable_prefix_caching=False)
    assert run(engine, make_requests()) == alone
    assert accepted(engine) > 5


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_in_blocks_of_any_size_and_from_the_prefix_cache(
    drafting: Callable[..., Engine], alone: list[list[int]], block_size: int
) -> None:
    """No rejected draft is in a cached block."""
    engine = drafting(block_size=block_size, num_blocks=512 // block_size)
    for _ in range(3):
        assert run(engine, make_requests()) == alone
    # A next turn finds the blocks of the answer, including those with accepted drafts.
    turns = [
        Request(f"r{i}", prompt + answer, SamplingParams(max_tokens=1))
        for i, (prompt, answer) in enumerate(zip(PROMPTS, alone, strict=True))
    ]
    run(engine, turns)
    for turn in turns:
        assert turn.num_cached_tokens == (len(turn.prompt_token_ids) - 1) // block_size * block_size


def test_preempted(drafting: Callable[..., Engine], alone: list[list[int]]) -> None:
    for caching in (True, False):
        engine = drafting(num_blocks=100, block_size=1, enable_prefix_caching=caching)
        assert run(engine, make_requests()) == alone
        assert engine.stats().preemptions_total >= 1
        assert accepted(engine) > 10


def test_while_neighbours_are_aborted(drafting: Callable[..., Engine], alone: list[list[int]]) -> None:
    engine = drafting(max_num_batched_tokens=32)
    requests = make_requests()
    for request in requests:
        engine.add(request)
    for i, steps in ((0, 2), (2, 3), (4, 3)):
        for _ in range(steps):
            engine.step()
        engine.abort(f"r{i}")
    while engine.has_unfinished:
        engine.step()
    engine.check_integrity()
    assert [requests[i].token_ids[len(PROMPTS[i]) :] for i in (1, 3)] == [alone[1], alone[3]]


def test_log_probabilities(load: Callable[..., Engine], drafting: Callable[..., Engine]) -> None:
    def logprobs(engine: Engine) -> dict[str, list[TokenLogprob]]:
        found: dict[str, list[TokenLogprob]] = {}
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, samplings(), strict=True)):
            engine.add(Request(f"r{i}", prompt, replace(sampling, logprobs=3)))
        while engine.has_unfinished:
            for output in engine.step():
                assert len(output.logprobs) == len(output.new_token_ids)
                found.setdefault(output.request_id, []).extend(output.logprobs)
        return found

    expected, engine = logprobs(load()), drafting()
    found = logprobs(engine)
    assert accepted(engine) > 20
    for request_id, theirs in expected.items():
        for ours, same in zip(found[request_id], theirs, strict=True):
            assert ours.token_id == same.token_id
            assert ours.logprob == pytest.approx(same.logprob, abs=1e-4)
            assert [value for _, value in ours.top] == pytest.approx([value for _, value in same.top], abs=1e-4)


def test_an_answer_ends_where_it_ends_without_drafts(drafting: Callable[..., Engine], alone: list[list[int]]) -> None:
    """At a stop token in the middle of the drafts, and never beyond max_tokens."""
    stops = [answer[len(answer) // 2] for answer in alone]
    stopping = [
        replace(sampling, stop_token_ids=frozenset({stop})) for sampling, stop in zip(samplings(), stops, strict=True)
    ]
    requests = [Request(f"r{i}", *arguments) for i, arguments in enumerate(zip(PROMPTS, stopping, strict=True))]
    expected = [answer[: answer.index(stop) + 1] for answer, stop in zip(alone, stops, strict=True)]
    assert run(drafting(1.0), requests) == expected
    short = [replace(sampling, max_tokens=4) for sampling in samplings()]
    requests = [Request(f"r{i}", *arguments) for i, arguments in enumerate(zip(PROMPTS, short, strict=True))]
    assert run(drafting(1.0), requests) == [answer[:4] for answer in alone]


@pytest.mark.parametrize("draft", ["llama", "llama-biased"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
        {"num_blocks": 100, "block_size": 1},
    ],
)
def test_with_a_draft_model(
    load: Callable[..., Engine], alone: list[list[int]], draft: str, options: dict[str, Any]
) -> None:
    """If it is the same model, all drafts are accepted, however blocks are reused. Few drafts of another model are."""
    engine = load("draft_model", draft, **options)
    for _ in range(2):
        assert run(engine, make_requests()) == alone
    stats = engine.stats()
    assert stats.draft_tokens_total > 50
    if draft == "llama":
        assert accepted(engine) == stats.draft_tokens_total
    else:
        assert accepted(engine) < stats.draft_tokens_total / 2


def test_with_drafts_from_the_requests_own_tokens(load: Callable[..., Engine]) -> None:
    """A model with few tokens to choose from repeats itself."""

    def answers(engine: Engine) -> list[list[int]]:
        few = dict.fromkeys(range(20, 24), 40.0)
        sampling = SamplingParams(temperature=0.0, max_tokens=120, logit_bias=few)
        return run(engine, [Request(f"r{i}", prompt, sampling) for i, prompt in enumerate(PROMPTS)])

    engine = load("ngram", num_blocks=256)
    assert answers(engine) == answers(load(num_blocks=256))
    assert accepted(engine) > 20
