"""Every member of the family against the formulas, in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backend.ops import OPS, create_ops
from backend.ops.base import Ops

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


@pytest.fixture(params=OPS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return create_ops(request.param)


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(ours: Tensor, exact: Tensor) -> None:
    assert ours.shape == exact.shape
    assert (ours.double() - exact).abs().max().item() < TOLERANCES[ours.dtype]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(ops: Ops, dtype: torch.dtype, with_bias: bool) -> None:
    x, weight, bias = random(5, 32, dtype=dtype), random(7, 32, dtype=dtype, seed=1) / 8, random(7, dtype=dtype, seed=2)
    exact = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    assert_close(ops.linear(x, weight, bias if with_bias else None), exact)


@pytest.mark.parametrize("shape", [(5, 32), (5, 3, 16)])
def test_rms_norm(ops: Ops, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    assert_close(ops.rms_norm(x, weight, 1e-6), rms_norm(x.double(), weight.double(), 1e-6))
    tiny = x * 1e-3  # where eps counts
    assert_close(ops.rms_norm(tiny, weight, 1e-6), rms_norm(tiny.double(), weight.double(), 1e-6))


def test_add_rms_norm(ops: Ops, dtype: torch.dtype) -> None:
    x, residual, weight = (random(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(5, 32), (5, 32), (32,)]))
    before = x.clone(), residual.clone()
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert_close(total, x.double() + residual.double())
    assert_close(normed, rms_norm(total.double(), weight.double(), 1e-6))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_rope(ops: Ops, dtype: torch.dtype) -> None:
    x = random(6, 3, 8, dtype=dtype)
    angles = random(6, 4, dtype=torch.float32, seed=1) * 3
    turned = torch.polar(torch.ones(6, 1, 4, dtype=torch.float64), angles.double()[:, None])
    exact = torch.complex(x.double()[..., :4], x.double()[..., 4:]) * turned
    assert_close(ops.rope(x, angles.cos(), angles.sin()), torch.cat((exact.real, exact.imag), dim=-1))


def test_silu_mul(ops: Ops, dtype: torch.dtype) -> None:
    gate_up = random(5, 24, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    assert_close(ops.silu_mul(gate_up), gate * torch.sigmoid(gate) * up)


def test_store_kv_writes_the_slots_and_nothing_else(ops: Ops, dtype: torch.dtype) -> None:
    key, value = random(3, 2, 8, dtype=dtype), random(3, 2, 8, dtype=dtype, seed=1)
    # As a layer's keys and values come: slices of one projection, not contiguous.
    qkv = torch.cat((random(3, 4, 8, dtype=dtype), key, value), dim=1)
    caches = [torch.zeros(5, 4, 2, 8, dtype=dtype) for _ in range(2)]
    ops.store_kv(qkv[:, 4:6], qkv[:, 6:8], *caches, torch.tensor([19, 0, 6]))
    for cache, rows in zip(caches, (key, value), strict=True):
        assert torch.equal(cache[[4, 0, 1], [3, 0, 2]], rows)
        assert cache.count_nonzero() == rows.count_nonzero()
