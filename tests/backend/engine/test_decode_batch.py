"""Batches of decode steps equal those of `make_batch`, over histories of requests that come, grow, stop and move."""

from __future__ import annotations

import random
from array import array
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from backend.engine.batch import Batch, make_batch
from backend.engine.decode_batch import DecodeBatches, Noise
from backend.engine.plan import ScheduledRequest
from backend.engine.request import Request
from backend.engine.sampling_batch import make_sampling_batch, uniform
from backend.engine.sampling_params import SamplingParams

BLOCK_SIZE, VOCAB_SIZE = 4, 100
GREEDY = {"temperature": 0.0}
PLAIN: list[dict[str, Any]] = [GREEDY, GREEDY, {}, {"top_p": 0.5, "top_k": 3}]
PENALISED: list[dict[str, Any]] = [
    {"frequency_penalty": 0.5},
    {**GREEDY, "repetition_penalty": 1.5, "presence_penalty": 1.0},
    {},
]
CPU = torch.device("cpu")


def values_of(value: Any, width: int) -> Any:
    """A batch as plain values. Block tables are cut to the width of the longest."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, value[:, :width].tolist() if value.dim() == 2 else value.tolist())
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, Request):
        return {field.name: values_of(getattr(value, field.name), width) for field in fields(value)}
    if isinstance(value, tuple):
        return [values_of(each, width) for each in value]
    if isinstance(value, array | np.ndarray):
        return value.tolist()
    return value


class History:
    """Requests with blocks of random numbers."""

    def __init__(self, seed: int, kinds: list[dict[str, Any]]) -> None:
        self.random = random.Random(seed)
        self.kinds = kinds
        self.requests: list[Request] = []

    def add(self) -> None:
        prompt = [self.random.randrange(100) for _ in range(self.random.randrange(1, 40))]
        kind: dict[str, Any] = self.random.choice(self.kinds)
        request = Request(f"r{self.random.random()}", prompt, SamplingParams(max_tokens=1000, **kind))
        request.num_computed_tokens = len(prompt) - 1
        self.requests.insert(self.random.randrange(len(self.requests) + 1), request)

    def change(self) -> None:
        if not self.requests or self.random.random() < 0.3:
            self.add()
        if self.random.random() < 0.2:
            del self.requests[self.random.randrange(len(self.requests))]
        if self.requests and self.random.random() < 0.2:  # preempted, and resumed in other blocks
            self.random.choice(self.requests).block_table = []
        if self.random.random() < 0.1:
            self.random.shuffle(self.requests)

    def plan(self) -> list[ScheduledRequest]:
        for request in self.requests:
            request.append(self.random.randrange(100))
            request.num_computed_tokens = len(request.token_ids) - 1
            missing = -(-len(request.token_ids) // BLOCK_SIZE) - len(request.block_table)
            request.block_table += [self.random.randrange(1, 10_000) for _ in range(max(0, missing))]
        return [ScheduledRequest(request, request.num_computed_tokens, 1) for request in self.requests]


@pytest.mark.parametrize("kinds", [PLAIN, PENALISED, [*PLAIN, *PENALISED, {"min_tokens": 2}]], ids=len)
@pytest.mark.parametrize("seed", range(3))
def test_a_batch_is_that_of_make_batch(seed: int, kinds: list[dict[str, Any]]) -> None:
    history, batches = History(seed, kinds), DecodeBatches(BLOCK_SIZE, CPU)
    for _ in range(150):
        history.change()
        if not (plan := history.plan()):
            continue
        width = max(len(request.block_table) for request in history.requests)
        expected: Batch = make_batch(plan, BLOCK_SIZE, CPU)
        made = batches.make(plan)
        assert values_of(made, width) == values_of(expected, width)
        assert batches.is_plain_greedy(made) == all(token.is_plain_greedy for token in expected.next_tokens)
        sampling = make_sampling_batch(expected.next_tokens, VOCAB_SIZE, CPU)
        assert values_of(batches.sampling(made, VOCAB_SIZE), width) == values_of(sampling, width)


def test_noise_follows_the_positions_of_each_request() -> None:
    """Also if some advance by more than one token, as after accepted drafts, or further than was computed ahead."""
    seeds, noise = [3, 2**63 - 1, 7], Noise([3, 2**63 - 1, 7])
    positions = [5, 900, 40]
    for steps in (
        [0, 0, 0],
        [1, 1, 1],
        [1, 1, 1],
        [1, 3, 1],
        [1, 1, 1],
        [-2, -2, -2],
        [40, 40, 40],
        [1, 1, 1],
        [0, 0, 1],
    ):
        positions = [position + step for position, step in zip(positions, steps, strict=True)]
        assert noise.at(positions).tolist() == uniform(seeds, positions).tolist()
