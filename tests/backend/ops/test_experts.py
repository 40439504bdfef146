"""Mixtures of experts by every member of `Ops`, against double precision and against sequential experts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from backend.model_files.mxfp4 import Mxfp4Tensor
from backend.ops.base import Ops
from backend.ops.experts import LinearWeight, SequentialExperts
from backend.quantization import create_quantization
from backend.quantization.base import Linear
from backend.quantization.mxfp4 import Mxfp4Linear
from tests.backend.levels import LEVELS, native_ops
from tests.backend.ops.conftest import TOLERANCES, random

NUM_EXPERTS, NUM_CHOSEN = 6, 3


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: Linear
    down: Linear

    @property
    def weights(self) -> tuple[LinearWeight, LinearWeight] | None:
        assert self.gate_up.packed_weight and self.down.packed_weight
        return self.gate_up.packed_weight, self.down.packed_weight

    def __call__(self, x: Tensor, /) -> Tensor:
        return self.down(self.gate_up(x))


def gated(gate: Tensor, up: Tensor, name: str) -> Tensor:
    if name == "swiglu_oai":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return up * (F.silu(gate) if name == "silu" else F.gelu(gate, approximate="tanh"))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights of all experts. first: [E, 2I, D], second: [E, D, I], and their biases, if they have any."""

    first: Tensor
    second: Tensor
    biases: tuple[Tensor, Tensor] | None
    gate: str

    def mlps(self, ops: Ops, quantization: str = "none") -> list[Mlp]:
        linear = create_quantization(quantization, ops).linear
        first_biases, second_biases = self.biases or ([None] * NUM_EXPERTS, [None] * NUM_EXPERTS)
        return [
            Mlp(linear(first, first_bias, self.gate), linear(second, second_bias))
            for first, second, first_bias, second_bias in zip(
                self.first, self.second, first_biases, second_biases, strict=True
            )
        ]

    def exact(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float64)
        for t, (own_weights, experts) in enumerate(zip(weights.double(), chosen, strict=True)):
            for factor, e in zip(own_weights, experts, strict=True):
                gate, up = self._product(x[t].double(), self.first[e], 0, e).chunk(2)
                out[t] += factor * self._product(gated(gate, up, self.gate), self.second[e], 1, e)
        return out

    def _product(self, x: Tensor, weight: Tensor, which: int, expert: Tensor) -> Tensor:
        return weight.double() @ x + (self.biases[which][expert].double() if self.biases else 0.0)


def checkpoint(
    hidden: int, inner: int, dtype: torch.dtype, *, with_bias: bool = False, gate: str = "silu"
) -> Checkpoint:
    first = random(NUM_EXPERTS, 2 * inner, hidden, dtype=dtype, seed=1) / hidden**0.5
    second = random(NUM_EXPERTS, hidden, inner, dtype=dtype, seed=2) / inner**0.5
    biases = (random(NUM_EXPERTS, 2 * inner, dtype=dtype, seed=3), random(NUM_EXPERTS, hidden, dtype=dtype, seed=4))
    return Checkpoint(first, second, biases if with_bias else None, gate)


def routing(rows: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Weights and experts, as from `route`. Most tokens choose the same few experts, and none chooses the last."""
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.tensor([5.0, 3.0, 1.0, 0.5, 0.2, 0.0])
    chosen = torch.multinomial(popularity.expand(rows, -1), NUM_CHOSEN, generator=generator)
    return torch.rand(rows, NUM_CHOSEN, generator=generator), chosen


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("rows", "num_experts", "num_chosen"), [(1, 8, 2), (5, 6, 6), (70, 33, 1), (600, 128, 8)])
def test_route(ops: Ops, dtype: torch.dtype, rows: int, num_experts: int, num_chosen: int, normalise: bool) -> None:
    scores = (
        torch.stack([torch.randperm(num_experts, generator=torch.Generator().manual_seed(i)) for i in range(rows)]).to(
            dtype
        )
        / 8
    )  # no two scores of a row are equal
    weights, chosen = ops.route(scores, num_chosen, normalise)
    assert (weights.dtype, chosen.dtype) == (torch.float32, torch.int64)
    exact, expected = scores.double().softmax(-1).topk(num_chosen, dim=-1)
    assert torch.equal(chosen, expected)
    if normalise:
        exact = exact / exact.sum(-1, keepdim=True)
    assert torch.allclose(weights.double(), exact, atol=1e-6, rtol=1e-5)


def test_nan_scores_route_to_existing_experts(ops: Ops, dtype: torch.dtype) -> None:
    """And the weights are NaN, so that the result is not mistaken for an answer."""
    scores = random(3, 8, dtype=dtype)
    scores[0] = torch.nan
    scores[1, 5] = torch.nan
    weights, chosen = ops.route(scores, 4, normalise=True)
    assert all(sorted(set(row)) == sorted(row) and set(row) <= set(range(8)) for row in chosen.tolist())
    assert weights.isnan().any(-1).tolist() == [True, True, False]


# Sizes with and without whole panels; rows of which an expert gets none, one, some, or more than one tile.
SHAPES = [(1, 64, 32), (2, 64, 48), (5, 96, 32), (40, 50, 14), (700, 128, 64)]


@pytest.mark.parametrize(("rows", "hidden", "inner"), SHAPES)
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "swiglu_oai"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_mixture(ops: Ops, dtype: torch.dtype, rows: int, hidden: int, inner: int, gate: str, with_bias: bool) -> None:
    made = checkpoint(hidden, inner, dtype, with_bias=with_bias, gate=gate)
    x, (weights, chosen) = random(rows, hidden, dtype=dtype), routing(rows)
    ours = ops.mixture_of_experts(made.mlps(ops))(x, weights, chosen)
    assert (ours.dtype, ours.shape) == (dtype, x.shape)
    exact = made.exact(x, weights, chosen)
    assert (ours.double() - exact).abs().max().item() < TOLERANCES[dtype] * max(1.0, exact.abs().max().item())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(("rows", "hidden", "inner"), [(1, 64, 32), (5, 96, 64), (300, 128, 64)])
def test_mixture_of_quantised_experts(
    ops: Ops, dtype: torch.dtype, quantization: str, rows: int, hidden: int, inner: int
) -> None:
    mlps = checkpoint(hidden, inner, dtype, with_bias=True).mlps(ops, quantization)
    x, (weights, chosen) = random(rows, hidden, dtype=dtype), routing(rows)
    ours, theirs = ops.mixture_of_experts(mlps)(x, weights, chosen), SequentialExperts(mlps)(x, weights, chosen)
    assert (ours - theirs).abs().max().item() < TOLERANCES[dtype] * max(1.0, theirs.abs().max().item())


@pytest.mark.parametrize("level", LEVELS)
def test_formats_that_the_kernels_do_not_read_use_sequential_experts(level: str) -> None:
    ops = native_ops(level, 1)
    mlps = checkpoint(64, 32, torch.bfloat16).mlps(ops, "fp8")
    x, (weights, chosen) = random(9, 64, dtype=torch.bfloat16), routing(9)
    assert torch.equal(ops.mixture_of_experts(mlps)(x, weights, chosen), SequentialExperts(mlps)(x, weights, chosen))


@pytest.mark.parametrize(("rows", "hidden", "inner"), [(1, 64, 32), (5, 96, 64), (300, 128, 64)])
def test_mixture_of_experts_in_mxfp4(ops: Ops, dtype: torch.dtype, rows: int, hidden: int, inner: int) -> None:
    firsts = [mxfp4(2 * inner, hidden, dtype, seed) for seed in range(NUM_EXPERTS)]
    seconds = [mxfp4(hidden, inner, dtype, seed + 50) for seed in range(NUM_EXPERTS)]
    biases = random(NUM_EXPERTS, 2 * inner, dtype=dtype, seed=3), random(NUM_EXPERTS, hidden, dtype=dtype, seed=4)
    made = Checkpoint(
        torch.stack([weight.dequantize() for weight in firsts]),
        torch.stack([weight.dequantize() for weight in seconds]),
        biases,
        "swiglu_oai",
    )
    mlps = [
        Mlp(Mxfp4Linear(ops, first, biases[0][e], made.gate), Mxfp4Linear(ops, second, biases[1][e], None))
        for e, (first, second) in enumerate(zip(firsts, seconds, strict=True))
    ]
    x, (weights, chosen) = random(rows, hidden, dtype=dtype), routing(rows)
    exact = made.exact(x, weights, chosen)
    ours = ops.mixture_of_experts(mlps)(x, weights, chosen)
    assert (ours.double() - exact).abs().max().item() < TOLERANCES[dtype] * max(1.0, exact.abs().max().item())


def mxfp4(outs: int, ins: int, dtype: torch.dtype, seed: int) -> Mxfp4Tensor:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (outs, ins // 2), generator=generator).to(torch.uint8)
    return Mxfp4Tensor(codes, torch.randint(121, 125, (outs, ins // 32), generator=generator).to(torch.uint8), dtype)


def test_all_tokens_choose_one_expert(ops: Ops, dtype: torch.dtype) -> None:
    made = checkpoint(64, 32, dtype)
    x, weights = random(40, 64, dtype=dtype), torch.full((40, 1), 0.5)
    chosen = torch.full((40, 1), NUM_EXPERTS - 1)
    exact = made.exact(x, weights, chosen)
    ours = ops.mixture_of_experts(made.mlps(ops))(x, weights, chosen)
    assert (ours.double() - exact).abs().max().item() < TOLERANCES[dtype] * max(1.0, exact.abs().max().item())


def test_a_nan_input_affects_its_own_row_only(ops: Ops, dtype: torch.dtype) -> None:
    mixture, (weights, chosen) = ops.mixture_of_experts(checkpoint(64, 32, dtype).mlps(ops)), routing(9)
    x = random(9, 64, dtype=dtype)
    x[4, 7] = torch.nan
    assert mixture(x, weights, chosen).isnan().any(-1).tolist() == [t == 4 for t in range(9)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_float32_rows_are_the_same_in_every_batch(level: str, threads: int, quantization: str) -> None:
    ops = native_ops(level, threads)
    mixture = ops.mixture_of_experts(checkpoint(96, 64, torch.float32).mlps(ops, quantization))
    x, (weights, chosen) = random(60, 96, dtype=torch.float32), routing(60)
    together = mixture(x, weights, chosen)
    for t in range(60):
        assert torch.equal(mixture(x[t : t + 1], weights[t : t + 1], chosen[t : t + 1])[0], together[t])
