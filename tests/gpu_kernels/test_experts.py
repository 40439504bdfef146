"""Triton's mixture of experts against sequential experts, over random shapes, weight formats and routings.

Runs in Triton's interpreter on a CPU (TRITON_INTERPRET=1), or on a GPU.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend.ops.experts import LinearWeight, MixtureOfExperts, SequentialExperts
from backend.ops.reference import ReferenceOps
from backend.quantization import create_quantization
from backend.quantization.base import Linear
from backend.triton_runtime import runs_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.skipif(not runs_triton(DEVICE), reason="no GPU, and no TRITON_INTERPRET=1 with triton"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),  # by the interpreter, for sigmoid
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # the same, for NaN
]
if runs_triton(DEVICE):
    from backend.ops import triton_experts
    from backend.ops.triton import TritonOps

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
STEPS = {"int4": 32, "fp8": 8}  # of sizes; weights whose sizes are not multiples of 16 stay unquantised with fp8


@dataclass(frozen=True)
class Case:
    tokens: int
    num_experts: int
    num_chosen: int
    hidden: int
    inner: int
    dtype: torch.dtype
    form: str
    gate: str
    has_bias: bool
    num_used: int  # experts that are chosen; the weights of the others are NaN
    seed: int


def cases() -> st.SearchStrategy[Case]:
    @st.composite
    def draw(draw: st.DrawFn) -> Case:
        form = draw(st.sampled_from(["none", "int8", "int4", "fp8"]))
        num_chosen = draw(st.integers(1, 4))
        num_used = draw(st.integers(num_chosen, 9))
        step = STEPS.get(form, 1)
        sizes = st.integers(1, 150 // step).map(lambda n: step * n)
        return Case(
            tokens=draw(st.integers(0, 12) | st.integers(13, 80)),
            num_experts=num_used + draw(st.integers(0, 3)),
            num_chosen=num_chosen,
            hidden=draw(sizes),
            inner=draw(sizes),
            dtype=draw(st.sampled_from([*TOLERANCES])),
            form=form,
            gate=draw(st.sampled_from(["silu", "gelu_tanh", "swiglu_oai"])),
            has_bias=draw(st.booleans()),
            num_used=num_used,
            seed=draw(st.integers(0, 1 << 30)),
        )

    return draw()


@dataclass(frozen=True, eq=False)
class Mlp:
    gate_up: Linear
    down: Linear

    @property
    def weights(self) -> tuple[LinearWeight, LinearWeight] | None:
        first, second = self.gate_up.packed_weight, self.down.packed_weight
        return (first, second) if first and second else None

    def __call__(self, x: Tensor, /) -> Tensor:
        return self.down(self.gate_up(x))


def mlps(
    num_experts: int, hidden: int, inner: int, dtype: torch.dtype, form: str = "none", gate: str = "silu",
    has_bias: bool = False, num_used: int | None = None, seed: int = 0,
) -> list[Mlp]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    linear = create_quantization(form, ReferenceOps()).linear

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    experts = []
    for expert in range(num_experts):
        factor = 1.0 if num_used is None or expert < num_used else torch.nan
        first, second = random(2 * inner, hidden) / hidden**0.5, random(hidden, inner) / inner**0.5
        tensors = (first, second, random(2 * inner), random(hidden))
        first, second, first_bias, second_bias = ((factor * each).to(dtype).to(DEVICE) for each in tensors)
        biases = (first_bias, second_bias) if has_bias else (None, None)
        experts.append(Mlp(linear(first, biases[0], gate), linear(second, biases[1])))
    return experts


def widened(experts: list[Mlp], dtype: torch.dtype) -> list[Mlp]:
    """The same weights with fp8 dequantised: a linear layer in fp8 would round its inputs, too."""

    def wide(linear: Linear) -> Linear:
        held = linear.packed_weight
        if held is None or held.format != "fp8" or held.scales is None:
            return linear
        weight = (held.values.float() * held.scales[:, None]).to(dtype)
        return create_quantization("none", ReferenceOps()).linear(weight, held.bias, held.gate)

    return [Mlp(wide(expert.gate_up), wide(expert.down)) for expert in experts]


def random_routing(tokens: int, num_used: int, num_chosen: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, num_used, generator=generator).argsort(dim=-1)[:, :num_chosen]
    return torch.rand(tokens, num_chosen, generator=generator).to(DEVICE), chosen.to(DEVICE)


def inputs(tokens: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@given(case=cases())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_random_mixtures(case: Case) -> None:
    experts = mlps(
        case.num_experts, case.hidden, case.inner, case.dtype, case.form, case.gate, case.has_bias, case.num_used,
        case.seed,
    )  # fmt: skip
    weights, chosen = random_routing(case.tokens, case.num_used, case.num_chosen, case.seed)
    x = inputs(case.tokens, case.hidden, case.dtype, case.seed)
    triton, sequential = TritonOps().mixture_of_experts(experts), SequentialExperts(widened(experts, case.dtype))
    assert not triton.needs_host_sync
    ours, expected = (mixture(x, weights, chosen) for mixture in (triton, sequential))
    assert (ours.dtype, ours.shape) == (case.dtype, x.shape)
    # For bfloat16, whose products are rounded in between, relative to the largest result.
    tolerance = TOLERANCES[case.dtype] * max(1.0, expected.abs().max().item() if case.tokens else 0.0)
    assert torch.allclose(ours.float(), expected.float(), rtol=0.0, atol=tolerance)


@given(
    tokens=st.integers(0, 12) | st.integers(13, 300), num_experts=st.integers(1, 40), num_chosen=st.integers(1, 8),
    size=st.sampled_from([16, 32]), seed=st.integers(0, 1 << 30),
)  # fmt: skip
@settings(max_examples=30, deadline=None, derandomize=True)
def test_every_assignment_is_in_one_block_of_its_expert(
    tokens: int, num_experts: int, num_chosen: int, size: int, seed: int
) -> None:
    chosen = random_routing(tokens, num_experts, min(num_chosen, num_experts), seed)[1].contiguous()
    if seed % 2:  # every token chooses the last expert
        chosen = torch.full((tokens, 1), num_experts - 1, device=DEVICE)
    blocks = triton_experts.group_by_expert(chosen, num_experts, size)
    found: dict[int, list[int]] = {}
    for expert, assignments in zip(blocks.experts.tolist(), blocks.assignments.tolist(), strict=True):
        if expert >= 0:
            here = [assignment for assignment in assignments if assignment >= 0]
            assert here, "an empty block"
            assert assignments == here + [-1] * (size - len(here))
            found.setdefault(expert, []).extend(here)
    experts = chosen.flatten().tolist()
    assert found == {expert: [i for i, each in enumerate(experts) if each == expert] for expert in sorted(set(experts))}
    assert [*found] == sorted(found)


@pytest.mark.parametrize("form", ["none", "int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_row_is_bitwise_the_same_in_every_batch(dtype: torch.dtype, form: str) -> None:
    """In the tiles for few tokens, and in those for many."""
    mixture = TritonOps().mixture_of_experts(mlps(4, 160, 96, dtype, form))
    x, (weights, chosen) = inputs(60, 160, dtype), random_routing(60, 4, 3)
    assert 3 * 4 <= 4 * triton_experts.FEW[dtype].assignments < 3 * 60
    together = mixture(x, weights, chosen)
    for start, end in ((0, 1), (7, 8), (59, 60), (3, 7), (20, 60)):
        assert torch.equal(mixture(x[start:end], weights[start:end], chosen[start:end]), together[start:end])


def test_fp8_without_rounded_inputs_is_close_to_fp8_with_rounded_inputs() -> None:
    experts = mlps(4, 160, 96, torch.bfloat16, "fp8")
    x, (weights, chosen) = inputs(20, 160, torch.bfloat16), random_routing(20, 4, 2)
    mixture = TritonOps().mixture_of_experts(experts)
    assert not mixture.needs_host_sync
    ours, rounded = mixture(x, weights, chosen).float(), SequentialExperts(experts)(x, weights, chosen).float()
    assert (ours - rounded).norm() / rounded.norm() < 0.06
    assert not torch.equal(ours, rounded)


def test_results_are_summed_in_the_order_of_expert_ids() -> None:
    mixture = TritonOps().mixture_of_experts(mlps(6, 64, 32, torch.float32))
    x, (weights, chosen) = inputs(9, 64, torch.float32), random_routing(9, 6, 5)
    order = torch.tensor([3, 1, 4, 0, 2], device=DEVICE)
    assert torch.equal(mixture(x, weights, chosen), mixture(x, weights[:, order], chosen[:, order]))


def test_the_first_of_equal_scores_is_chosen() -> None:
    scores = torch.tensor(
        [[1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5, [-torch.inf, 3.0, -torch.inf, -torch.inf, 4.0]], device=DEVICE
    )
    weights, chosen = TritonOps().route(scores, 4, normalise=False)
    assert chosen.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [4, 1, 0, 2]]
    assert torch.allclose(weights, scores.softmax(-1).gather(-1, chosen))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("normalise", [False, True])
def test_nan_and_inf_scores_choose_existing_experts(bad: float, normalise: bool) -> None:
    scores = torch.zeros(3, 5, device=DEVICE)
    scores[0], scores[1, 2] = bad, bad
    weights, chosen = TritonOps().route(scores, 3, normalise)
    for row in chosen.tolist():
        assert len({*row}) == 3
        assert {*row} <= {*range(5)}
    assert weights.isnan().all(-1).tolist() == [True, bad != -torch.inf, False]


def test_no_host_sync_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the meta device fail when the host reads them."""
    meta = torch.device("meta")
    monkeypatch.setattr(triton_experts, "kernels", MagicMock())
    mixture = triton_experts.TritonMixtureOfExperts(
        [_on(meta, expert) for expert in mlps(4, 64, 32, torch.bfloat16, "int8")]
    )
    for tokens in (1, 64):
        weights, chosen = triton_experts.route(torch.empty(tokens, 4, device=meta), 2, normalise=True)
        x = torch.empty(tokens, 64, dtype=torch.bfloat16, device=meta)
        assert mixture(x, weights, chosen).shape == x.shape
    assert not mixture.needs_host_sync


def test_the_experts_own_weights_are_released_once_they_are_copied() -> None:
    experts = mlps(3, 64, 32, torch.float32)
    references = [weakref.ref(weight.values) for expert in experts for weight in expert.weights or ()]
    mixture: MixtureOfExperts = TritonOps().mixture_of_experts(experts)
    assert all(reference() is not None for reference in references)
    del experts
    gc.collect()
    assert not any(reference() is not None for reference in references)
    del mixture


def test_experts_without_known_weights_are_called_sequentially() -> None:
    @dataclass(frozen=True)
    class Another(Mlp):
        @property
        def weights(self) -> None:
            return None

    made = mlps(3, 64, 32, torch.float32)
    mixture = TritonOps().mixture_of_experts([*made[:2], Another(made[2].gate_up, made[2].down)])
    assert mixture.needs_host_sync


def _on(device: torch.device, expert: Mlp) -> tuple[LinearWeight, LinearWeight]:
    def moved(weight: LinearWeight) -> LinearWeight:
        scales = None if weight.scales is None else weight.scales.to(device)
        return LinearWeight(weight.format, weight.values.to(device), scales, None, weight.gate)

    assert expert.weights
    first, second = expert.weights
    return moved(first), moved(second)
