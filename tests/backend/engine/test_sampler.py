from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.engine.masks import AllowedTokens
from backend.engine.request import Request
from backend.engine.sampler import REFERENCE, SampledToken, sample, score
from backend.engine.sampling_batch import NextToken, SamplingBatch, make_sampling_batch, uniform
from backend.engine.sampling_params import SamplingParams
from backend.native import library
from backend.ops import create_ops
from backend.ops.base import Ops

VOCAB_SIZE = 8
CPU = torch.device("cpu")
OPS = [REFERENCE, create_ops("native")] if library.load() else [REFERENCE]
LOGITS = [2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -4.0]


def make_request(prompt: tuple[int, ...] = (0,), output: tuple[int, ...] = (), **sampling: Any) -> Request:
    request = Request("r", list(prompt), SamplingParams(max_tokens=64, **sampling))
    for token_id in output:
        request.append(token_id)
    return request


def sampled_by_all(logits: Tensor, batch: SamplingBatch) -> list[SampledToken]:
    """Samples with the reference and the kernels. They agree, except for the last bits of log-probabilities."""
    first, *others = (sample(logits.clone(), batch, ops=ops) for ops in OPS)
    for other in others:
        assert [sampled.token_id for sampled in other] == [sampled.token_id for sampled in first]
    return first


def draw(requests: list[Request], logits: list[list[float]] | None = None) -> list[int]:
    rows = torch.tensor(logits or [LOGITS] * len(requests))
    batch = make_sampling_batch([*map(NextToken, requests)], VOCAB_SIZE, CPU)
    return [sampled.token_id for sampled in sampled_by_all(rows, batch)]


def frequencies(num_draws: int = 8000, **sampling: Any) -> dict[int, float]:
    """The frequency of each token over `num_draws` seeds."""
    counts = Counter(draw([make_request(seed=seed, **sampling) for seed in range(num_draws)]))
    return {token: count / num_draws for token, count in counts.items()}


def softmax(logits: list[float], temperature: float = 1.0) -> list[float]:
    weights = [math.exp(value / temperature) for value in logits]
    return [weight / sum(weights) for weight in weights]


def renormalised(tokens: range) -> dict[int, float]:
    kept = softmax(LOGITS)[tokens.start : tokens.stop]
    return {token: probability / sum(kept) for token, probability in zip(tokens, kept, strict=True)}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    seen = frequencies(temperature=temperature)
    for token, probability in enumerate(softmax(LOGITS, temperature)):
        # Four standard deviations of a frequency over 8000 draws.
        assert seen.get(token, 0.0) == pytest.approx(probability, abs=4 * math.sqrt(probability / 8000))


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 1}, range(1)),
        ({"top_k": 3}, range(3)),
        ({"top_k": 100}, range(8)),
        ({"top_p": 0.5}, range(1)),  # the first token alone has 0.55
        ({"top_p": 0.6}, range(2)),  # and with the second it is 0.76
        ({"top_p": 0.8}, range(3)),
        ({"min_p": 0.3}, range(2)),  # exp(1.0 - 2.0) = 0.37, exp(0.5 - 2.0) = 0.22
        ({"min_p": 0.2, "top_k": 7, "top_p": 0.99}, range(3)),
        ({"top_k": 2, "top_p": 0.74}, range(2)),  # of the two tokens that top-k keeps, the first has 0.73
        ({"top_k": 2, "top_p": 0.72}, range(1)),
    ],
)
def test_filters_keep_the_most_likely_and_their_proportions(filters: dict[str, Any], kept: range) -> None:
    expected = renormalised(kept)
    seen = frequencies(**filters)
    assert set(seen) <= set(expected)
    for token, probability in expected.items():
        assert seen.get(token, 0.0) == pytest.approx(probability, abs=4 * math.sqrt(probability / 8000))


def test_greedy_takes_the_most_likely_whatever_the_filters_and_the_seed() -> None:
    greedy = [make_request(temperature=0.0, seed=seed, top_k=5, top_p=0.9) for seed in range(20)]
    assert draw(greedy) == [0] * 20
    assert draw([make_request(temperature=1e-9)]) == [0]  # dividing by this would overflow


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    kinds: list[dict[str, Any]] = [
        {"seed": 1},
        {"temperature": 0.0},
        {"seed": 2, "top_k": 3},
        {"seed": 3, "top_p": 0.7, "min_p": 0.01},
        {"seed": 4, "frequency_penalty": 1.5, "output": (0, 0, 1)},
        {"seed": 5, "logit_bias": {7: 5.0}},
        {"seed": 6, "temperature": 0.3, "logprobs": 2},
    ]
    for shift in range(30):
        requests = [make_request(prompt=(0,) * (1 + shift), **kind) for kind in kinds]
        alone = [draw([request])[0] for request in requests]
        assert draw(requests) == alone
        assert draw(requests[::-1]) == alone[::-1]


def test_noise_is_a_function_of_seed_and_position() -> None:
    seeds = [seed for seed in (0, 1, 2, 2**63, -1) for _ in range(200)]
    values = uniform(seeds, [*range(200)] * 5).tolist()
    assert values == [uniform([seed], [i % 200]).item() for i, seed in enumerate(seeds)]
    assert len(set(values)) == len(values)
    assert all(0.0 <= value < 1.0 for value in values)
    assert sum(values) / len(values) == pytest.approx(0.5, abs=0.03)
    # Neighbouring positions are uncorrelated: over a thousand pairs, the correlation is near zero.
    shifted = sum((a - 0.5) * (b - 0.5) for a, b in pairwise(values)) / len(values) * 12
    assert abs(shifted) < 0.1


def test_requests_without_a_seed_differ() -> None:
    assert len({make_request().seed for _ in range(10)}) == 10


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    flat = [[0.0] * VOCAB_SIZE]
    # Token 0 is in the prompt, 1 occurred once in the output, 2 three times.
    for penalty, expected in (("presence_penalty", [0, -2, -2]), ("frequency_penalty", [0, -2, -6])):
        request = make_request((0, 0), (1, 2, 2, 2), temperature=0.0, logprobs=0, **{penalty: 2.0})
        for token, value in enumerate(expected):
            # A bias of just under, then just over the penalty decides whether the token wins.
            for delta, wins in ((-0.1, False), (0.1, True)):
                biased = make_request(
                    (0, 0), (1, 2, 2, 2), temperature=0.0, logit_bias={token: -value + delta}, **{penalty: 2.0}
                )
                assert (draw([biased], flat) == [token]) is wins
        assert draw([request], flat) == [0]


def test_repetition_penalty_counts_the_prompt_too_and_pushes_down_on_either_side_of_zero() -> None:
    request = make_request((0,), (7,), temperature=0.0, repetition_penalty=2.0)
    assert draw([request], [[1.9, 1.0, 0.9, 0, 0, 0, 0, 0]]) == [1]
    assert draw([request], [[-1.0, -1.9, -2.0, -3, -3, -3, -3, -1.0]]) == [1]


def test_logit_bias_forbids_and_enforces() -> None:
    assert draw([make_request(temperature=0.0, logit_bias={0: -100.0})]) == [1]
    assert set(frequencies(200, logit_bias={6: 100.0})) == {6}


def test_min_tokens_forbids_stop_tokens_until_then() -> None:
    stop = frozenset({0})
    for num_output, expected in ((0, 1), (1, 1), (2, 0)):
        request = make_request((5,), (3,) * num_output, temperature=0.0, min_tokens=2, stop_token_ids=stop)
        assert draw([request]) == [expected]


def test_a_bad_word_is_not_completed_after_drafts_either() -> None:
    def forbidden(output: list[int], drafts: tuple[int, ...] = (), prompt: tuple[int, ...] = (4, 5)) -> list[int]:
        request = Request("r", list(prompt), SamplingParams(max_tokens=9, bad_words=((7,), (4, 5, 6), (5, 8))))
        for token_id in output:
            request.append(token_id)
        return NextToken(request, drafts).forbidden()

    assert forbidden([]) == [7]  # the prompt does not count
    assert forbidden([5]) == [7, 8]
    assert forbidden([4, 5]) == forbidden([4], (5,)) == forbidden([], (4, 5)) == forbidden([1], (4, 5)) == [7, 6, 8]
    assert forbidden([4, 5, 6]) == forbidden([5], (4,)) == [7]


@pytest.mark.parametrize("ops", OPS)
def test_logprobs_are_those_of_the_unchanged_logits(ops: Ops) -> None:
    request = make_request(temperature=0.0, logprobs=3, logit_bias={4: 100.0})
    plain = make_request(temperature=0.0)
    none = make_request(temperature=0.0, logprobs=0)
    batch = make_sampling_batch([*map(NextToken, [request, plain, none])], VOCAB_SIZE, CPU)
    with_top, without, only_own = sample(torch.tensor([LOGITS] * 3), batch, ops=ops)
    expected = [math.log(probability) for probability in softmax(LOGITS)]
    (logprob,) = with_top.logprobs
    assert logprob.token_id == 4 and logprob.logprob == pytest.approx(expected[4], abs=1e-5)
    assert [token for token, _ in logprob.top] == [0, 1, 2]
    assert [value for _, value in logprob.top] == pytest.approx(expected[:3], abs=1e-5)
    assert without.logprobs == ()
    assert only_own.logprobs[0].top == ()


CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "penalties": {"repetition_penalty": 3.0, "presence_penalty": 1.5},
    "bias": {"logit_bias": {0: -7.0}},
    "filters": {"temperature": 1.5, "top_k": 3, "top_p": 0.9},
    "grammar": {},
}


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("change", CHANGES)
def test_logprobs_in_a_batch_with_rows_without(change: str, ops: Ops) -> None:
    """Whatever else is applied to the logits of these rows and of others."""
    logits = torch.stack([torch.tensor(LOGITS).roll(row) for row in range(4)])
    requests = [
        make_request((0, 1, 2), (1,), seed=row, **{"temperature": 0.0, "logprobs": count, **CHANGES[change]})
        for row, count in enumerate((None, 2, None, 8))
    ]
    batch = make_sampling_batch([*map(NextToken, requests)], VOCAB_SIZE, CPU)
    words = torch.full((4, 1), 0b10101010, dtype=torch.int32)
    allowed = AllowedTokens(torch.arange(4), words, {}) if change == "grammar" else None
    expected = torch.log_softmax(logits.double(), dim=-1)
    sampled = sample(logits.clone(), batch, allowed, ops)
    assert [len(each.logprobs) for each in sampled] == [0, 1, 0, 1]
    for row, count in ((1, 2), (3, 8)):
        (logprob,) = sampled[row].logprobs
        assert logprob.token_id == sampled[row].token_id
        assert logprob.logprob == pytest.approx(expected[row, logprob.token_id].item(), abs=1e-5)
        assert logprob.rank == int((logits[row] > logits[row, logprob.token_id]).sum()) + 1
        assert [token for token, _ in logprob.top] == logits[row].argsort(descending=True)[:count].tolist()


@pytest.mark.parametrize("kind", [{}, {"top_p": 0.999}, {"top_k": 29_000}, {"min_p": 1e-9}])
def test_every_token_of_a_large_vocabulary_can_be_sampled_and_a_forbidden_one_never_is(kind: dict[str, Any]) -> None:
    size = 30_000
    logits = torch.zeros(1, size).expand(64, -1)
    forbidden = {0: float("-1e9"), size - 1: float("-1e9")}
    requests = [make_request(seed=seed, logit_bias=forbidden, **kind) for seed in range(64)]
    batch = make_sampling_batch([*map(NextToken, requests)], size, CPU)
    tokens = [sampled.token_id for sampled in sampled_by_all(logits, batch)]
    assert len(set(tokens)) > 60
    assert not set(tokens) & set(forbidden)
    assert max(tokens) > size * 0.9
    assert min(tokens) < size * 0.1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("ops", OPS)
def test_nan_and_inf_logits_still_give_a_token_of_the_vocabulary(value: float, ops: Ops) -> None:
    requests = [make_request(seed=seed, top_p=top_p) for seed in range(20) for top_p in (1.0, 0.9)]
    batch = make_sampling_batch([*map(NextToken, requests)], VOCAB_SIZE, CPU)
    sampled = sample(torch.full((len(requests), VOCAB_SIZE), value), batch, ops=ops)
    assert all(0 <= each.token_id < VOCAB_SIZE for each in sampled)


def test_a_random_number_of_zero_does_not_give_a_forbidden_token() -> None:
    request = make_request(logit_bias={0: -1e9, 1: -1e9})
    batch = make_sampling_batch([NextToken(request)], VOCAB_SIZE, CPU)
    assert batch.random is not None
    zero = replace(batch, random=replace(batch.random, uniform=torch.zeros(1, dtype=torch.float64)))
    assert sampled_by_all(torch.tensor([LOGITS]), zero)[0].token_id == 2


@pytest.mark.parametrize("ops", OPS)
def test_a_scored_token_has_its_rank_in_the_vocabulary(ops: Ops) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]] * 4)
    scored = score(logits, None, torch.tensor([0, 1, 2, 3]), [1, 1, 1, 1], ops)
    assert [token.rank for token in scored] == [4, 1, 3, 2]
    assert {token.top[0][0] for token in scored} == {1}
