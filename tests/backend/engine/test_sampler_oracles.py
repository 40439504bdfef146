"""The sampler against two others: the logits processors of transformers, and one in plain Python."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from backend.engine.request import Request
from backend.engine.sampler import REFERENCE, sample
from backend.engine.sampling_batch import NextToken, make_sampling_batch
from backend.engine.sampling_params import SamplingParams
from backend.ops import reference
from backend.ops.base import Ops
from backend.ops.native import NativeOps
from backend.ops.reference import probabilities
from tests.backend.levels import LEVELS_OF_THIS_CPU

CPU = torch.device("cpu")
REFERENCE_NAME = "reference"
NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def make_request(prompt: list[int], output: list[int], seed: int, **sampling: Any) -> Request:
    request = Request("r", prompt, SamplingParams(max_tokens=64, seed=seed, **sampling))
    for token_id in output:
        request.append(token_id)
    return request


def random_filters(random: Random) -> dict[str, Any]:
    choices: dict[str, list[Any]] = {
        "top_p": [1.0, 0.999, 0.9, 0.5, 0.05],
        "top_k": [0, 1, 7, 256, 257, 900],
        "min_p": [0.0, 1e-6, 0.01, 0.3, 1.0],
    }
    return {name: random.choice(values) for name, values in choices.items()}


def transformers_distribution(logits: Tensor, request: Request) -> Tensor:
    sampling = request.sampling
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in sampling.logit_bias.items()]))
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(sampling.top_p))
    return torch.softmax(processors(torch.tensor([request.token_ids]), logits.clone()), dim=-1)


def our_distribution(logits: Tensor, requests: list[Request]) -> Tensor:
    batch = make_sampling_batch([*map(NextToken, requests)], logits.shape[-1], CPU)
    assert batch.random is not None
    if batch.penalties:
        logits = REFERENCE.penalise(logits, batch.penalties.entries(logits.device))
    if batch.bias:
        logits = REFERENCE.add_bias(logits, batch.bias)
    found = probabilities(logits, batch.random)
    return found / found.sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("sharpness", [0.2, 1.0, 4.0])
def test_the_distribution_is_that_of_transformers(sharpness: float) -> None:
    vocab_size, random = 1000, Random(7)
    logits = torch.randn(60, vocab_size, generator=torch.Generator().manual_seed(1)) * sharpness
    requests = [
        make_request(
            [random.randrange(vocab_size) for _ in range(9)],
            [random.randrange(vocab_size) for _ in range(5)],
            seed=0,
            temperature=random.choice([0.3, 0.7, 1.0, 1.7]),
            repetition_penalty=random.choice([1.0, 1.3, 0.8]),
            logit_bias=random.choice([{}, {3: 2.5, 77: -100.0}]),
            **random_filters(random),
        )
        for _ in logits
    ]
    expected = torch.cat([transformers_distribution(row[None], r) for row, r in zip(logits, requests, strict=True)])
    found = our_distribution(logits, requests)
    # Both compare a sum of floats with a bound, so the last kept token may differ by one position.
    differing = (found > 0) != (expected > 0)
    assert differing.sum(dim=-1).max() <= 1
    assert expected[differing].sum() < 1e-2
    same = ~differing.any(dim=-1)
    assert same.float().mean() > 0.9
    assert torch.allclose(found[same], expected[same], atol=1e-6)


def plain_draw(logits: list[float], request: Request) -> int:
    """As in the docstring of sampler.py, with lists and in double precision."""
    sampling, adjusted = request.sampling, list(logits)
    output = request.token_ids[request.num_prompt_tokens :]
    for token in set(request.token_ids):
        value = adjusted[token]
        value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        value -= sampling.frequency_penalty * output.count(token)
        value -= sampling.presence_penalty * (token in output)
        adjusted[token] = value
    for token, bias in sampling.logit_bias.items():
        adjusted[token] += bias
    for word in sampling.bad_words:
        if tuple([*output, word[-1]][-len(word) :]) == word:
            adjusted[word[-1]] = -math.inf
    if request.num_output_tokens < sampling.min_tokens:
        for token in sampling.stop_token_ids:
            adjusted[token] = -math.inf
    if sampling.temperature == 0.0:
        return adjusted.index(max(adjusted))
    weights = [math.exp((value - max(adjusted)) / sampling.temperature) for value in adjusted]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = [token for token in order if weights[token] >= sampling.min_p][: sampling.top_k or None]
    left, before, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if before < sampling.top_p * left:
            nucleus.append(token)
        before += weights[token]
    point = plain_uniform(request.seed, len(request.token_ids)) * sum(weights[token] for token in nucleus)
    for token in sorted(nucleus):
        point -= weights[token]
        if point < 0:
            return token
    return max(nucleus)


def plain_uniform(seed: int, position: int) -> float:
    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    return (mix((mix(seed % 2**64) + position) % 2**64) >> 12) / 2**52


@pytest.mark.slow
@pytest.mark.parametrize("name", [REFERENCE_NAME, *LEVELS_OF_THIS_CPU])
def test_the_tokens_are_those_of_a_plain_sampler(name: str) -> None:
    ops: Ops = REFERENCE if name == REFERENCE_NAME else NativeOps(level_name=name)
    vocab_size, random = 700, Random(3)
    rows, requests = [], []
    for seed in range(300):
        row = [random.gauss(0, 3) for _ in range(vocab_size)]
        output = [random.randrange(20) for _ in range(8)]
        likeliest = row.index(max(row))
        rows.append(row)
        requests.append(
            make_request(
                [random.randrange(vocab_size) for _ in range(8)],
                output,
                seed=random.choice([seed, -seed, 2**63 - 1 - seed]),
                temperature=random.choice([0.0, 0.4, 1.0, 1.5]),
                presence_penalty=random.choice([0.0, 1.5]),
                frequency_penalty=random.choice([0.0, -0.7]),
                repetition_penalty=random.choice([1.0, 1.4]),
                logit_bias=random.choice([{}, {5: 4.0, 6: -100.0}]),
                bad_words=random.choice([(), ((likeliest,),), ((*output[-2:], likeliest), (4,)), ((3, 3, likeliest),)]),
                min_tokens=random.choice([0, 20]),
                stop_token_ids=frozenset(range(5)),
                **random_filters(random),
            )
        )
    batch = make_sampling_batch([*map(NextToken, requests)], vocab_size, CPU)
    found = [sampled.token_id for sampled in sample(torch.tensor(rows), batch, ops=ops)]
    expected = [plain_draw(row, request) for row, request in zip(rows, requests, strict=True)]
    # Double precision there and single precision here: a point between two tokens may fall to either of them.
    assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 1
    assert len(set(found)) > 100


def test_the_size_of_the_shortlist_does_not_change_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab_size, random = 2000, Random(5)
    sharpness = torch.tensor([0.05, 0.5, 1.0, 3.0]).repeat(50)[:, None]
    logits = torch.randn(200, vocab_size, generator=torch.Generator().manual_seed(2)) * sharpness
    requests = [make_request([0], [], seed=seed, **random_filters(random)) for seed in range(len(logits))]
    batch = make_sampling_batch([*map(NextToken, requests)], vocab_size, CPU)
    found = []
    for sizes in ((1,), (16, 300), (256, 8192), ()):
        monkeypatch.setattr(reference, "SHORTLIST_SIZES", sizes)
        found.append(sample(logits, batch))
    assert found[0] == found[1] == found[2] == found[3]
