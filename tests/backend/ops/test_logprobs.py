"""Log-probabilities, ranks and the most likely tokens by every member of `Ops`, against double precision."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend.ops.base import Ops
from backend.ops.native import NativeOps
from backend.ops.sampling import LogprobTensors
from tests.backend.levels import LEVELS, native_ops

INF, NAN = math.inf, math.nan


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(count: int, vocab_size: int) -> Tensor:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(1))


def falling(logits: Tensor, count: int) -> Tensor:
    """The most likely tokens, by a stable sort."""
    return logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def ranks(logits: Tensor, token_ids: Tensor) -> list[int]:
    return [int((row > row[token]).sum()) + 1 for row, token in zip(logits, token_ids.tolist(), strict=True)]


def is_near(found: Tensor, expected: Tensor, ops: Ops) -> bool:
    """The kernels round once, from a sum that is within 1e-6. Torch rounds in between."""
    error = 1e-6 + expected.abs() * 2.0**-24 if isinstance(ops, NativeOps) else torch.full_like(expected, 3e-5)
    return bool(((found == expected) | ((found - expected).abs() <= error)).all())


def equal(some: LogprobTensors, others: LogprobTensors) -> bool:
    """Bitwise equality."""
    names = ("own", "ranks", "top_ids", "top")
    return all(torch.equal(getattr(some, name), getattr(others, name)) for name in names)


# Less than a vector, whole vectors, and sizes that end inside a chunk.
@pytest.mark.parametrize("vocab_size", [1, 7, 16, 255, 256, 257, 1000, 5003, 40_000])
@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_against_double_precision(ops: Ops, vocab_size: int, scale: float, num_top: int) -> None:
    logits, token_ids = random(12, vocab_size) * scale + 3.0, tokens(12, vocab_size)
    logits[::3, vocab_size // 3 : vocab_size // 2] = -INF
    logits[1::3, : vocab_size // 2] = -INF
    before = logits.clone()
    found = ops.logprobs(logits, None, token_ids, num_top)
    expected = torch.log_softmax(logits.double(), dim=-1)
    assert is_near(found.own, expected.gather(1, token_ids[:, None])[:, 0], ops)
    assert found.ranks.tolist() == ranks(logits, token_ids)
    assert torch.equal(found.top_ids, falling(logits, num_top))
    assert is_near(found.top, expected.gather(1, found.top_ids), ops)
    assert torch.equal(logits, before)


LOGITS = st.integers(-20, 20).map(lambda i: i / 4) | st.sampled_from(
    [-INF, 0.0, -0.0]
)  # few values, so that many are equal


@settings(max_examples=300)
@given(
    st.lists(LOGITS, min_size=1, max_size=40),
    st.integers(1, 60),
    st.dictionaries(st.integers(0, 2400), LOGITS, max_size=30),
    st.integers(0, 25) | st.integers(0, 2500),
)
def test_equal_logits_are_ordered_by_token_id(
    ops: Ops, part: list[float], repeated: int, others: dict[int, float], num_top: int
) -> None:
    row = torch.tensor(part * repeated)
    for token, value in others.items():
        row[token % len(row)] = value
    token_ids = torch.tensor([0, len(row) // 2, len(row) - 1])
    logits = row.repeat(3, 1)
    found = ops.logprobs(logits, None, token_ids, num_top)
    assert torch.equal(found.top_ids, falling(logits, num_top))  # the vocabulary may be smaller than num_top
    assert found.ranks.tolist() == ranks(logits, token_ids)


def test_the_most_likely_tokens_may_be_in_one_chunk_or_in_many(ops: Ops) -> None:
    together, apart, rising = torch.zeros(3, 10_000).unbind()
    together[5000:5020] = torch.arange(1.0, 21.0)
    apart[torch.arange(20) * 500 + 7] = torch.arange(20.0, 0.0, -1.0)
    rising += torch.arange(10_000) / 1000
    found = ops.logprobs(torch.stack((together, apart, rising)), None, torch.tensor([5019, 7, 0]), 20)
    assert found.top_ids.tolist() == [
        [*range(5019, 4999, -1)],
        [*range(7, 10_000, 500)],
        [*range(9999, 9979, -1)],
    ]
    assert found.ranks.tolist() == [1, 1, 10_000]


@pytest.mark.parametrize("vocab_size", [3, 300, 1000])
@pytest.mark.parametrize("values", [[NAN], [INF], [NAN, NAN, INF], [NAN, -INF, INF], [INF, INF]], ids=str)
def test_rows_with_nan_or_inf(ops: Ops, vocab_size: int, values: list[float]) -> None:
    usual = random(2, vocab_size)
    broken = usual[0].clone()
    indexes = [vocab_size - 1 - i * (vocab_size // 3) for i in range(len(values))]
    broken[indexes] = torch.tensor(values)
    nothing = torch.full((vocab_size,), -INF)
    logits, token_ids = torch.stack((broken, usual[0], nothing, nothing + NAN, usual[1])), tokens(5, vocab_size)
    found = ops.logprobs(logits, None, token_ids, 4)
    for row in (0, 2, 3):
        assert found.own[row].isnan()
        assert found.top[row].isnan().all()
    assert found.own[[1, 4]].isfinite().all()
    assert found.top[[1, 4]].isfinite().all()
    assert torch.equal(found.top_ids, falling(logits, 4))
    assert found.ranks.tolist() == ranks(logits, token_ids)


def test_logits_far_apart(ops: Ops) -> None:
    logits = torch.full((3, 600), -3e38)
    logits[0, 300], logits[1, 599], logits[2, 7:9] = 3e38, -1e4, 1e4
    found = ops.logprobs(logits, None, torch.tensor([300, 599, 8]), 3)
    assert found.own.tolist() == pytest.approx([0.0, 0.0, -math.log(2)], abs=1e-6)
    assert found.top_ids.tolist() == [[300, 0, 1], [599, 0, 1], [7, 8, 0]]
    assert found.top[:, 2].tolist() == [-INF, pytest.approx(-3e38), pytest.approx(-3e38)]


def test_the_largest_logit_may_come_last(ops: Ops) -> None:
    """The sum so far is scaled down then."""
    logits = torch.arange(3000).repeat(2, 1) / torch.tensor([[100.0], [10.0]])
    token_ids = torch.tensor([0, 2999])
    expected = torch.log_softmax(logits.double(), dim=-1).gather(1, token_ids[:, None])[:, 0]
    assert is_near(ops.logprobs(logits, None, token_ids, 0).own, expected, ops)


@pytest.mark.parametrize("vocab_size", [300, 5000])
def test_a_row_does_not_depend_on_the_batch(ops: Ops, vocab_size: int) -> None:
    logits, token_ids = random(20, vocab_size) * 3, tokens(20, vocab_size)
    together = ops.logprobs(logits, None, token_ids, 5)
    for i in range(20):
        one = slice(i, i + 1)
        alone = ops.logprobs(logits[one], None, token_ids[one], 5)
        assert equal(
            alone, LogprobTensors(together.own[one], together.ranks[one], together.top_ids[one], together.top[one])
        )
    rows = torch.tensor([3, 4, 19])
    some = LogprobTensors(together.own[rows], together.ranks[rows], together.top_ids[rows], together.top[rows])
    assert equal(ops.logprobs(logits, rows, token_ids[rows], 5), some)
    apart = torch.stack((random(20, vocab_size), logits), dim=1)[:, 1]
    assert equal(ops.logprobs(apart, rows, token_ids[rows], 5), some)


@pytest.mark.parametrize("level", LEVELS)
def test_threads_change_nothing(level: str) -> None:
    logits, token_ids = random(60, 20_000) * 3, tokens(60, 20_000)
    alone, *others = (native_ops(level, threads) for threads in (1, 2, 5))
    expected = alone.logprobs(logits, None, token_ids, 20)
    assert all(equal(ops.logprobs(logits, None, token_ids, 20), expected) for ops in others)
