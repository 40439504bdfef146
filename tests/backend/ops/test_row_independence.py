"""A row of a result depends on its own row only: not on the batch, on NaN in other rows, or on the threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backend.ops.base import INT4_GROUP
from tests.backend.levels import LEVELS, native_ops
from tests.backend.ops.conftest import random


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "ins"), [(300, 2048), (700, 1024)])
def test_a_packed_product_is_the_same_in_every_batch(level: str, threads: int, rows: int, ins: int) -> None:
    """Also if many rows are processed in parts of their inputs or in groups, and few rows are not."""
    ops = native_ops(level, threads)
    x, weight = random(rows, ins, dtype=torch.bfloat16), random(96, ins, dtype=torch.bfloat16, seed=1) / 32
    int8, int4 = (weight * 900).to(torch.int8), (weight * 900).to(torch.uint8)[:, : ins // 2].contiguous()
    scales, groups = torch.rand(96), torch.rand(96, ins // INT4_GROUP).bfloat16()
    plain, packed8 = ops.pack(weight, torch.bfloat16), ops.pack(int8, torch.bfloat16)
    packed4 = ops.pack_int4(int4, groups, torch.bfloat16)
    with_gate = ops.pack(weight[:64], torch.bfloat16, "silu")
    cases: list[tuple[Tensor, Callable[[slice], Tensor]]] = [
        (plain, lambda some: ops.linear(x[some], plain, None)),
        (with_gate, lambda some: ops.linear(x[some], with_gate, None, "silu")),
        (packed8, lambda some: ops.linear_int8(x[some], packed8, scales, None)),
        (packed4, lambda some: ops.linear_int4(x[some], packed4, groups, None)),
    ]
    for packed, compute in cases:
        together = compute(slice(0, rows))
        for some in (slice(0, 1), slice(4, 6), slice(7, 10), slice(3, 20), slice(100, 164), slice(rows - 9, rows)):
            if packed.dim() > 2:
                assert torch.equal(compute(some), together[some])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("count", [1, 2, 9, 40])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_nan_and_inf_affect_their_own_row_only(level: str, count: int, poison: float) -> None:
    """Also if inputs are quantised to integers."""
    ops = native_ops(level)
    x, weight = random(count, 256, dtype=torch.bfloat16), random(96, 256, dtype=torch.bfloat16, seed=1)
    int8, int4 = (weight * 30).to(torch.int8), (weight * 30).to(torch.uint8)[:, :128].contiguous()
    scales, groups = torch.rand(96), torch.rand(96, 256 // INT4_GROUP).bfloat16()
    plain, packed8 = ops.pack(weight, torch.bfloat16), ops.pack(int8, torch.bfloat16)
    packed4 = ops.pack_int4(int4, groups, torch.bfloat16)
    poisoned = x.clone()
    poisoned[count // 2, 77] = poison
    others = [row for row in range(count) if row != count // 2]
    cases: list[Callable[[Tensor], Tensor]] = [
        lambda x: ops.linear(x, plain, None),
        lambda x: ops.linear_int8(x, packed8, scales, None),
        lambda x: ops.linear_int4(x, packed4, groups, None),
    ]
    for compute in cases:
        result = compute(poisoned)
        assert not result[count // 2].isfinite().any()
        assert torch.equal(result[others], compute(x)[others])


@pytest.mark.parametrize("level", LEVELS)
def test_a_float32_row_is_bitwise_the_same_in_every_batch(level: str) -> None:
    ops = native_ops(level)
    x, weight = random(67, 200, dtype=torch.float32), random(83, 200, dtype=torch.float32, seed=1)
    norm, cos, sin = (random(n, dtype=torch.float32, seed=n) for n in (200, 67 * 100, 67 * 100))
    numbers, scales = (weight * 40).round().to(torch.int8), torch.rand(83)
    cases: list[Callable[[slice], Tensor]] = [
        lambda rows: ops.linear(x[rows], weight, None),
        lambda rows: ops.linear_int8(x[rows], numbers, scales, None),
        lambda rows: ops.rms_norm(x[rows], norm, 1e-6),
        lambda rows: ops.rope(x[rows].unsqueeze(1), cos.view(67, 100)[rows], sin.view(67, 100)[rows]),
        lambda rows: ops.silu_mul(x[rows]),
    ]
    for compute in cases:
        together = compute(slice(0, 67))
        for size in (1, 2, 3, 5, 16, 33):
            for start in range(0, 67, size):
                rows = slice(start, start + size)
                assert torch.equal(compute(rows), together[rows])


@pytest.mark.parametrize("level", LEVELS)
def test_threads_change_nothing(level: str) -> None:
    x, weight = random(33, 256, dtype=torch.bfloat16), random(700, 256, dtype=torch.bfloat16, seed=1)
    one, two = native_ops(level, 1), native_ops(level, 2)
    for rows in (1, 5, 33):
        assert torch.equal(one.linear(x[:rows], weight, None), two.linear(x[:rows], weight, None))
