"""Sampling by every member of `Ops`, against the reference; bitwise where no sums are involved."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend.ops.base import Ops
from backend.ops.native import NativeOps
from backend.ops.reference import ReferenceOps, probabilities
from backend.ops.sampling import LogitBias, LogitEntries, Penalties, RandomRows, RowPenalties, SamplingFilters
from tests.backend.levels import LEVELS, native_ops

REFERENCE = ReferenceOps()
MAX_SHARES = 64  # of each kind that are tested for one row
INF = math.inf


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_of(
    logits: Tensor,
    shares: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> RandomRows:
    """All rows with the same parameters."""
    count, vocab_size = logits.shape
    rows, top_k = torch.arange(count), min(top_k or vocab_size, vocab_size)
    filters = SamplingFilters(
        rows, torch.full((count,), top_k), torch.full((count,), top_p), torch.full((count,), min_p)
    )
    is_filtered = top_k < vocab_size or top_p < 1.0 or min_p > 0.0
    return RandomRows(rows, torch.full((count,), temperature), shares, filters if is_filtered else None)


def drawn_by(ops: Ops, row: list[float], **wanted: float) -> set[int]:
    """The tokens that are sampled from one row for 64 random numbers."""
    shares = torch.arange(64, dtype=torch.float64) / 64
    logits = torch.tensor([row]).repeat(64, 1)
    return set(ops.draw(logits, rows_of(logits, shares, **wanted)).tolist())  # type: ignore[arg-type]


# Less than a vector, whole vectors, and sizes that end inside a chunk.
@pytest.mark.parametrize("vocab_size", [1, 7, 16, 255, 256, 257, 1000])
@pytest.mark.parametrize("scale", [0.5, 6.0])
def test_draws_invert_the_distribution(ops: Ops, vocab_size: int, scale: float) -> None:
    rows = 400
    logits = random(rows, vocab_size) * scale
    logits[::3, vocab_size // 3 : vocab_size // 2] = -INF  # as for forbidden tokens
    temperature = torch.linspace(0.2, 2.0, rows)
    shares = torch.linspace(0.0, 1.0, rows + 1, dtype=torch.float64)[:-1].flip(0)
    drawn = ops.draw(logits, RandomRows(torch.arange(rows), temperature, shares, None))
    until = torch.softmax(logits.double() / temperature.double()[:, None], -1).cumsum(-1)
    behind = until.gather(1, drawn[:, None]).squeeze(1)
    before = torch.where(drawn > 0, until.gather(1, (drawn - 1).clamp(min=0)[:, None]).squeeze(1), 0.0)
    assert (before < behind).all(), "a token of probability 0 was sampled"
    assert ((before - 1e-6 < shares) & (shares < behind + 1e-6)).all()
    assert len(set(drawn.tolist())) > min(vocab_size, 50) // 2


COARSE, FINE = st.integers(-60, 60).map(lambda i: i / 4), st.integers(-60, 60).map(lambda i: i / 64)
LOGITS = COARSE | FINE | st.just(-INF)  # few values, so that many are equal


@st.composite
def rows(draw: st.DrawFn) -> list[float]:
    """Some values repeated many times, and others in some places."""
    row = draw(st.lists(LOGITS, min_size=1, max_size=30)) * draw(st.sampled_from([1, 2, 40, 70]))
    for place, value in draw(st.dictionaries(st.integers(0, len(row) - 1), LOGITS, max_size=30)).items():
        row[place] = value
    return row


FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-5, 0.3, 1.0, 4.0]),
        "top_k": st.none() | st.integers(1, 12) | st.integers(1, 2200),
        "top_p": st.just(1.0) | st.sampled_from([0.999, 0.9, 0.5, 0.05, 1e-6, 1e-38]),
        "min_p": st.just(0.0) | st.sampled_from([1e-6, 0.01, 0.3, 1.0]),
    }
)


def is_clear(row: Tensor, temperature: float, top_k: int | None, top_p: float, min_p: float) -> bool:
    """Whether no filter's bound is so close to a weight that rounding decides."""
    weights = ((row.double() - row.max()) / temperature).exp()
    if min_p < 1.0 and ((weights - min_p).abs() < 1e-5 * min_p).any():
        return False
    falling = weights[weights >= min_p].sort(descending=True).values[:top_k]
    sums = falling.cumsum(0)
    borders = sums[:-1][falling[1:] < falling[:-1]] / sums[-1]
    return not ((borders - top_p).abs() < 1e-4).any()


@pytest.mark.slow
@settings(max_examples=400)
@given(rows(), FILTERS)
def test_draws_are_those_of_the_reference(ops: Ops, row: list[float], wanted: dict[str, float]) -> None:
    """The same tokens are kept, with the same probabilities: the middle of each token's interval, and points near its
    ends, give that token."""
    logits = torch.tensor([row])
    assume(max(row) > -INF)
    assume(is_clear(logits[0], **wanted))  # type: ignore[arg-type]
    likely = probabilities(logits, rows_of(logits, torch.zeros(1), **wanted))[0].double()  # type: ignore[arg-type]
    likely /= likely.sum()
    expected, shares = [], []
    for part, least in ((0.5, 1e-6), (0.01, 1e-3), (0.99, 1e-3)):
        tokens = (likely > least).nonzero()[:, 0]
        tokens = tokens[torch.linspace(0, len(tokens) - 1, min(len(tokens), MAX_SHARES)).long()]
        expected += tokens.tolist()
        shares += (likely.cumsum(0) - likely * part)[tokens].tolist()
    logits = logits.repeat(len(shares), 1)
    uniform = torch.tensor(shares, dtype=torch.float64)
    drawn = ops.draw(logits, rows_of(logits, uniform, **wanted))  # type: ignore[arg-type]
    assert drawn.tolist() == expected


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        ({"top_k": 1}, {1, 4, 5}),
        ({"top_k": 3}, {1, 4, 5}),
        ({"top_k": 4}, {0, 1, 3, 4, 5}),
        ({"top_p": 1e-30}, {1, 4, 5}),
        ({"top_p": 0.1}, {1, 4, 5}),
        ({"top_p": 0.91}, {1, 4, 5}),  # together they have 0.915
        ({"top_p": 0.92}, {0, 1, 3, 4, 5}),
        ({"min_p": 1.0}, {1, 4, 5}),
        ({"min_p": 0.05}, {0, 1, 3, 4, 5}),
        ({"top_k": 4, "top_p": 0.96}, {0, 1, 3, 4, 5}),  # of the first four, three have 0.957
        ({"top_k": 4, "top_p": 0.95}, {1, 4, 5}),
        ({"top_k": 5, "top_p": 0.95}, {0, 1, 3, 4, 5}),  # of the first five, they have 0.917
        ({"min_p": 0.5, "top_p": 0.99}, {1, 4, 5}),
        ({"min_p": 0.1, "top_p": 0.99, "top_k": 6}, {0, 1, 3, 4, 5}),
    ],
)
def test_tokens_as_likely_as_the_last_one_kept_are_kept_too(ops: Ops, wanted: dict[str, float], kept: set[int]) -> None:
    assert drawn_by(ops, [0.0, 2.0, -3.0, 0.0, 2.0, 2.0, -INF], **wanted) == kept


@pytest.mark.parametrize(
    "others", [{"min_p": 0.3}, {"top_k": 3}, {"top_k": 3, "min_p": 0.01}, {"top_k": 9, "min_p": 0.3}]
)
def test_top_p_refers_to_what_the_other_filters_leave(ops: Ops, others: dict[str, float]) -> None:
    row = [math.log(0.05)] * 600  # together 30 times the most likely token
    row[10], row[300], row[590] = 0.0, math.log(0.5), math.log(0.4)
    for top_p, kept in ((0.5, {10}), (0.75, {10, 300}), (0.8, {10, 300, 590})):  # of 1.9 in all
        assert drawn_by(ops, row, top_p=top_p, **others) == kept


EXTREMES = [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 900, "top_p": 0.999, "min_p": 1e-9}]


@pytest.mark.parametrize("wanted", EXTREMES, ids=str)
@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e38])
def test_all_but_one_forbidden(ops: Ops, wanted: dict[str, float], temperature: float) -> None:
    for size, token in ((1, 0), (300, 299), (1000, 500)):
        row = [-INF] * size
        row[token] = -1e4
        assert drawn_by(ops, row, temperature=temperature, **wanted) == {token}


@pytest.mark.parametrize("wanted", EXTREMES, ids=str)
def test_a_temperature_near_zero_gives_the_most_likely_token(ops: Ops, wanted: dict[str, float]) -> None:
    row = random(700).tolist()
    assert drawn_by(ops, row, temperature=1e-5, **wanted) == {row.index(max(row))}


@pytest.mark.parametrize("wanted", EXTREMES, ids=str)
def test_draws_from_nan_and_inf_stay_within_the_vocabulary(ops: Ops, wanted: dict[str, float]) -> None:
    logits = random(6, 300)
    logits[0] = math.nan
    logits[1, 150] = math.nan
    logits[2] = -INF
    logits[3, 7] = INF
    logits[4, 299] = math.nan
    shares = torch.full((6,), 0.999999, dtype=torch.float64)
    drawn = ops.draw(logits, rows_of(logits, shares, **wanted)).tolist()  # type: ignore[arg-type]
    assert all(0 <= token < 300 for token in drawn)
    if isinstance(ops, NativeOps):
        assert drawn[3] == 7
        assert drawn[1] != 150
        assert drawn[4] != 299


def some_of_each(count: int, vocab_size: int, seed: int) -> RandomRows:
    """Rows with different parameters."""
    generator = torch.Generator().manual_seed(seed)

    def picked(values: list[float]) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (count,), generator=generator)]

    top_k, top_p, min_p = picked([vocab_size, 1, 40, 2000]), picked([1.0, 0.9, 0.3]), picked([0.0, 0.0, 0.02])
    is_filtered = (top_k < vocab_size) | (top_p < 1) | (min_p > 0)
    return RandomRows(
        torch.arange(count),
        picked([0.2, 1.0, 1.7]),
        torch.rand(count, generator=generator, dtype=torch.float64),
        SamplingFilters(is_filtered.nonzero()[:, 0], top_k.long(), top_p, min_p),
    )


def only(random: RandomRows, row: int) -> RandomRows:
    """One row alone."""
    filters = random.filters
    assert filters
    is_filtered = row in filters.rows.tolist()
    part = slice(row, row + 1)
    alone = SamplingFilters(torch.tensor([0]), filters.top_k[part], filters.top_p[part], filters.min_p[part])
    return RandomRows(torch.tensor([0]), random.temperature[part], random.uniform[part], alone if is_filtered else None)


def assert_keeps_what_the_reference_keeps(ops: Ops, logits: Tensor, wanted: dict[str, float]) -> None:
    """logits: [1, V]. Tries tokens of all ranks, most of them the last ones that are kept."""
    likely = probabilities(logits, rows_of(logits, torch.zeros(1), **wanted))[0].double()  # type: ignore[arg-type]
    likely /= likely.sum()
    falling = likely.sort(descending=True, stable=True).indices[: int((likely > 0).sum())]
    tokens = torch.cat((falling[:: len(falling) // 20 + 1], falling[-20:]))
    shares = (likely.cumsum(0) - likely / 2)[tokens]
    repeated = logits.repeat(len(tokens), 1)
    drawn = ops.draw(repeated, rows_of(repeated, shares, **wanted))  # type: ignore[arg-type]
    assert drawn.tolist() == tokens.tolist()


@pytest.mark.parametrize(
    "wanted", [{"top_p": 0.9}, {"top_p": 0.3}, {"top_k": 9000}, {"min_p": 0.2}, {"top_p": 0.97, "min_p": 0.2}]
)
@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0])
def test_filters_keep_as_many_of_many_weights_as_the_reference(
    ops: Ops, scale: float, wanted: dict[str, float]
) -> None:
    """Also if nearly all weights are about equal, as those of random logits are."""
    assert_keeps_what_the_reference_keeps(ops, random(1, 30_000) * scale, wanted)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("place", range(8))
def test_top_p_is_exact_if_a_sample_of_the_weights_misleads(ops: Ops, top_p: float, place: int) -> None:
    """The kernels look at every eighth weight first. One in eight differs from the others here."""
    logits = random(1, 32_768, seed=place) * 0.01
    for difference in (-2.0, 2.0):
        changed = logits.clone()
        changed[:, place::8] += difference
        assert_keeps_what_the_reference_keeps(ops, changed, {"top_p": top_p})


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("difference", [-2.0, 0.5, 2.0])
def test_top_p_is_exact_if_the_sampled_blocks_differ_from_the_others(ops: Ops, top_p: float, difference: float) -> None:
    """Top-p alone is decided by 256 blocks of 16 tokens first (`keep_top_p` in filters.h)."""
    logits = random(1, 32_768) * 0.01
    for i in range(0, 4096, 16):
        begin = logits.shape[1] // 256 * i // 4096 * 256 + i * 7 % 256
        logits[0, begin : begin + 16] += difference
    assert_keeps_what_the_reference_keeps(ops, logits, {"top_p": top_p})


@pytest.mark.parametrize("vocab_size", [300, 5000])
def test_a_draw_does_not_depend_on_its_neighbours(ops: Ops, vocab_size: int) -> None:
    logits, random_rows = random(60, vocab_size) * 3, some_of_each(60, vocab_size, seed=3)
    together = ops.draw(logits, random_rows).tolist()
    assert [ops.draw(logits[i : i + 1], only(random_rows, i)).item() for i in range(60)] == together
    among_others = torch.stack((random(60, vocab_size), logits), dim=1).flatten(0, 1)
    moved = replace(random_rows, rows=torch.arange(60) * 2 + 1)
    assert ops.draw(among_others, moved).tolist() == together


@pytest.mark.parametrize("level", LEVELS)
def test_threads_change_no_draw(level: str) -> None:
    logits, random_rows = random(60, 20_000) * 3, some_of_each(60, 20_000, seed=4)
    penalties = some_penalties(60, 20_000, 500)
    found = []
    for threads in (1, 2, 5):
        ops = native_ops(level, threads)
        found.append(ops.draw(ops.penalise(logits.clone(), penalties), random_rows))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("vocab_size", [300, 20_000])
def test_draws_from_bfloat16_are_those_from_the_same_numbers_in_float32(ops: Ops, vocab_size: int) -> None:
    scores, random_rows = (random(40, vocab_size) * 3).bfloat16(), some_of_each(40, vocab_size, seed=6)
    assert torch.equal(ops.choose(scores.clone(), random_rows, None), ops.draw(scores.float(), random_rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_random", [True, False])
@pytest.mark.parametrize("have_penalties", [True, False])
def test_chosen_tokens_are_those_of_the_single_operations(
    ops: Ops, dtype: torch.dtype, is_random: bool, have_penalties: bool
) -> None:
    """In a batch with random and greedy rows, and rows with and without penalties."""
    count, vocab_size = 24, 700
    scores = (random(count, vocab_size) * 3).to(dtype)
    rows = torch.arange(count)[torch.arange(count) % 3 > 0]
    drawn = replace(some_of_each(len(rows), vocab_size, seed=7), rows=rows) if is_random else None
    generator = torch.Generator().manual_seed(8)
    ids = [torch.randperm(vocab_size, generator=generator)[: 90 * (row % 4)].tolist() for row in range(count)]
    counts = [[float(token % 3) for token in each] for each in ids]
    factors = np.stack([np.linspace(low, high, count, dtype=np.float32) for low, high in ((-1, 2), (0, 1), (0.5, 2))])
    penalties = RowPenalties(
        tuple(array("q", each) for each in ids), tuple(array("f", each) for each in counts), factors
    )
    changed = scores.float()
    if have_penalties:
        changed = ops.penalise(changed.clone(), penalties.entries(torch.device("cpu")))
    expected = ops.argmax(changed)
    assert not have_penalties or not torch.equal(expected, ops.argmax(scores))
    if drawn:
        expected[rows] = ops.draw(changed, drawn)
    assert torch.equal(ops.choose(scores.clone(), drawn, penalties if have_penalties else None), expected)


def some_penalties(rows: int, vocab_size: int, each: int) -> Penalties:
    generator = torch.Generator().manual_seed(5)
    token_ids = torch.cat([torch.randperm(vocab_size, generator=generator)[:each] for _ in range(rows)])
    count = rows * each
    factors = [torch.rand(count, generator=generator) * 2 - shift for shift in (1, 1, -0.1)]
    counts = torch.randint(4, (count,), generator=generator).float()
    return Penalties(LogitEntries(torch.arange(rows).repeat_interleave(each), token_ids), counts, *factors)


@pytest.mark.parametrize(("rows", "each"), [(3, 1), (7, 40), (40, 500)])
def test_penalties_are_bitwise_those_of_the_reference(ops: Ops, rows: int, each: int) -> None:
    logits, penalties = random(rows, 700) * 5, some_penalties(rows, 700, each)
    logits[:, ::50] = -INF
    expected = REFERENCE.penalise(logits, penalties)
    assert not torch.equal(expected, logits)
    assert torch.equal(ops.penalise(logits.clone(), penalties), expected)


def test_a_bias_is_bitwise_that_of_the_reference(ops: Ops) -> None:
    entries = LogitEntries(torch.tensor([0, 0, 2]), torch.tensor([5, 299, 0]))
    logits, bias = random(3, 300), LogitBias(entries, torch.tensor([2.7, -INF, -100.0]))
    assert torch.equal(ops.add_bias(logits.clone(), bias), REFERENCE.add_bias(logits, bias))
    assert ops.add_bias(logits.clone(), bias)[0, 299] == -INF


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300, 1000])
def test_forbidden_tokens(ops: Ops, vocab_size: int) -> None:
    words = -(-vocab_size // 32)
    allowed = torch.randint(-(2**31), 2**31, (3, words), generator=torch.Generator().manual_seed(1)).int()
    allowed[1], allowed[2] = 0, -1
    logits, rows = random(5, vocab_size), torch.tensor([0, 2, 3])
    expected = logits.clone()
    for row, bits in zip(rows.tolist(), allowed.tolist(), strict=True):
        for token in range(vocab_size):
            if not bits[token // 32] >> token % 32 & 1:
                expected[row, token] = -INF
    assert torch.equal(ops.forbid(logits.clone(), rows, allowed), expected)


def test_rows_that_share_memory_are_separated(ops: Ops) -> None:
    logits = torch.zeros(1, 40).expand(3, -1)
    bias = LogitBias(LogitEntries(torch.tensor([1]), torch.tensor([7])), torch.tensor([5.0]))
    assert ops.add_bias(logits, bias)[:, 7].tolist() == [0.0, 5.0, 0.0]
    assert logits.unique().tolist() == [0.0]
