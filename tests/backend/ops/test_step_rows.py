"""Sampling of steps that read buffers only, by every member of `Ops`, against the operations that it combines."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.ops.base import Ops
from backend.ops.reference import ReferenceOps, probabilities
from backend.ops.sampling import (
    COUNTS_INPUT,
    MARKED,
    MAX_BIASES,
    MAX_SEEN,
    SCORED,
    SEEN_BITS,
    LogitBias,
    LogitEntries,
    Penalties,
    StepRows,
)

REFERENCE = ReferenceOps()
INF = math.inf
ROWS = 14


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some_rows(vocab_size: int, seed: int) -> tuple[StepRows, dict[int, dict[int, int]], dict[int, dict[int, float]]]:
    """Greedy rows, and by row the output counts before the step and the biases that `marks` hold."""
    dice = Random(seed)
    counted: dict[int, dict[int, int]] = {}
    biased: dict[int, dict[int, float]] = {}
    marks = torch.zeros(ROWS, vocab_size, dtype=torch.int32)
    biases = torch.zeros(ROWS, MAX_BIASES + 1)
    tokens = [*range(vocab_size)]
    for row in range(ROWS):
        some = dice.sample(tokens, min(vocab_size, 40))
        counted[row] = {token: dice.choice([0, 0, 1, 7]) for token in some[: dice.choice([0, 20])]}
        chosen = dice.sample(tokens, min(vocab_size, dice.choice([0, 3, 300])))
        biased[row] = {token: dice.choice([-INF, -2.5, 40.0]) for token in chosen}
        for token, count in counted[row].items():
            marks[row, token] += 1 + count
        for index, (token, bias) in enumerate(biased[row].items(), 1):
            marks[row, token] += index << SEEN_BITS
            biases[row, index] = bias
    flags = [dice.choice([0, MARKED, MARKED | COUNTS_INPUT]) | dice.choice([0, SCORED]) for _ in range(ROWS)]
    masks = torch.randint(-(2**31), 2**31, (ROWS, -(-vocab_size // 32)), generator=torch.Generator().manual_seed(seed))
    masks[:, 0] |= 1  # at least one token is allowed
    factors = random(3, ROWS, seed=seed).abs() + 0.3
    rows = StepRows(
        input_ids=torch.tensor([dice.choice([*counted[row], dice.choice(tokens)]) for row in range(ROWS)]),
        flags=torch.tensor(flags),
        temperature=torch.zeros(ROWS),
        uniform=torch.zeros(ROWS, dtype=torch.float64),
        top_k=torch.full((ROWS,), vocab_size),
        top_p=torch.ones(ROWS),
        min_p=torch.zeros(ROWS),
        presence=factors[0] * torch.tensor([1.0, 0.0] * (ROWS // 2)),
        frequency=factors[1] - 0.6,
        repetition=factors[2],
        marks=marks,
        biases=biases,
        mask_rows=torch.tensor([dice.choice([-1, dice.randrange(ROWS)]) for _ in range(ROWS)]),
        masks=masks.int(),
    )
    return rows, counted, biased


def changed(
    logits: Tensor, rows: StepRows, counted: dict[int, dict[int, int]], biased: dict[int, dict[int, float]]
) -> Tensor:
    """The logits after penalties, biases and masks, one row at a time."""
    result = logits.clone()
    for row, flag in enumerate(rows.flags.tolist()):
        counts = dict(counted[row])
        if flag & COUNTS_INPUT:
            token = int(rows.input_ids[row])
            counts[token] = counts.get(token, 0) + 1
        one = result[row : row + 1]
        if flag & MARKED and counts:
            entries = LogitEntries(torch.zeros(len(counts), dtype=torch.int64), torch.tensor([*counts]))
            factors = (each[row].repeat(len(counts)) for each in (rows.presence, rows.frequency, rows.repetition))
            one = REFERENCE.penalise(one, Penalties(entries, torch.tensor([*counts.values()]).float(), *factors))
        if flag & MARKED and biased[row]:
            entries = LogitEntries(torch.zeros(len(biased[row]), dtype=torch.int64), torch.tensor([*biased[row]]))
            one = REFERENCE.add_bias(one, LogitBias(entries, torch.tensor([*biased[row].values()])))
        if (mask := int(rows.mask_rows[row])) >= 0:
            one = REFERENCE.forbid(one, torch.tensor([0]), rows.masks[mask : mask + 1])
        result[row] = one[0]
    return result


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 300, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_greedy_tokens_are_bitwise_those_of_the_single_operations(ops: Ops, vocab_size: int, seed: int) -> None:
    """Few different logits, so that many are equal: the first of the largest is the token."""
    rows, counted, biased = some_rows(vocab_size, seed)
    logits = (random(ROWS, vocab_size, seed=seed) * 2).round() / 2
    before, flags, marks = logits.clone(), rows.flags.clone(), rows.marks.clone()
    expected = changed(logits, rows, counted, biased).argmax(-1)
    assert torch.equal(ops.sample_rows(logits, rows, has_changes=True), expected)
    assert torch.equal(logits, before)
    # The input token is counted, once, where that was wanted, and nothing else has changed.
    assert torch.equal(rows.flags, flags & ~COUNTS_INPUT)
    for row in (flags & COUNTS_INPUT).nonzero()[:, 0].tolist():
        token = int(rows.input_ids[row])
        marks[row, token] += 1 if marks[row, token] & MAX_SEEN else 2
    assert torch.equal(rows.marks, marks)
    assert torch.equal(ops.sample_rows(logits, rows, has_changes=True), expected)
    assert torch.equal(rows.marks, marks)


def test_rows_without_changes_read_none(ops: Ops) -> None:
    rows, _, _ = some_rows(300, 0)
    marks, logits = rows.marks.clone(), random(ROWS, 300)
    assert torch.equal(ops.sample_rows(logits, rows, has_changes=False), logits.argmax(-1))
    assert torch.equal(rows.marks, marks)


@pytest.mark.parametrize("has_changes", [False, True])
@pytest.mark.parametrize("vocab_size", [300, 5000])
def test_greedy_and_random_rows_side_by_side(ops: Ops, has_changes: bool, vocab_size: int) -> None:
    """Each random number points to the middle of a token's share of its row's distribution."""
    rows, counted, biased = some_rows(vocab_size, 5)
    logits = random(ROWS, vocab_size, seed=2) * 3
    dice = Random(1)
    filters: list[dict[str, Any]] = [
        {}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 900, "top_p": 0.97, "min_p": 0.001},
    ]  # fmt: skip
    for row in range(0, ROWS, 2):
        rows.temperature[row] = dice.choice([0.4, 1.0, 1.6])
        for name, value in filters[row // 2 % len(filters)].items():
            getattr(rows, name)[row] = min(value, vocab_size)
    expected_logits = changed(logits, rows, counted, biased) if has_changes else logits
    expected = expected_logits.argmax(-1)
    for place, row in enumerate((rows.temperature > 0).nonzero()[:, 0].tolist()):
        likely = probabilities(expected_logits, rows.random())[place].double()
        likely /= likely.sum()
        token = dice.choice((likely > 1e-3).nonzero()[:, 0].tolist())
        rows.uniform[row] = likely.cumsum(0)[token] - likely[token] / 2
        expected[row] = token
    assert ops.sample_rows(logits, rows, has_changes=has_changes).tolist() == expected.tolist()


@pytest.mark.parametrize("vocab_size", [20, 33, 300, 20_000])
@pytest.mark.parametrize("kind", ["different", "equal", "peaked"])
def test_scores_are_the_log_probabilities_of_the_models_logits(ops: Ops, vocab_size: int, kind: str) -> None:
    rows, _, _ = some_rows(vocab_size, 1)
    logits = random(ROWS, vocab_size) * 3
    if kind == "equal":  # more candidates than the kernel has memory for
        logits = logits.round().clamp(-1, 1)
    if kind == "peaked":  # fewer candidates than are wanted
        logits[:, 7] += 500.0
        logits[:, vocab_size // 2 :] = -INF
    token_ids = torch.arange(ROWS) % vocab_size
    found = ops.score_rows(logits, rows, token_ids, num_top=20)
    expected = REFERENCE.logprobs(logits, None, token_ids, num_top=20)
    wanted = (rows.flags & SCORED).nonzero()[:, 0]
    assert len(wanted) > 3
    assert torch.equal(found.ranks[wanted], expected.ranks[wanted])
    assert torch.equal(found.top_ids[wanted], expected.top_ids[wanted])
    assert torch.allclose(found.own[wanted], expected.own[wanted], atol=3e-5)
    assert torch.allclose(found.top[wanted], expected.top[wanted], atol=3e-5)


def test_scores_of_rows_with_nan_or_inf_are_nan(ops: Ops) -> None:
    rows, _, _ = some_rows(300, 1)
    rows = replace(rows, flags=torch.full((ROWS,), SCORED))
    logits = random(ROWS, 300)
    logits[0], logits[1, 3], logits[2], logits[3, 7] = math.nan, math.nan, -INF, INF
    found = ops.score_rows(logits, rows, torch.zeros(ROWS, dtype=torch.int64), num_top=5)
    assert found.own[:4].isnan().all()
    assert not found.own[4:].isnan().any()
    assert ((found.top_ids >= 0) & (found.top_ids < 300)).all()
