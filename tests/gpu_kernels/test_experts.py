"""Triton's mixtures of experts, beside the experts asked one by one: any shapes, forms and visitors.

By Triton's interpreter on a CPU (TRITON_INTERPRET=1), or on a GPU.
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
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),  # the interpreter's, of a sigmoid
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # the same, of what is no number
]
if runs_triton(DEVICE):
    from backend.ops import triton_experts
    from backend.ops.triton import TritonOps

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
STEPS = {"int4": 32, "fp8": 8}  # of sizes; fp8 leaves weights as they are whose sizes are no multiples of 16


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
    popular: int  # experts that are visited; the others hold what is no number
    seed: int


def cases() -> st.SearchStrategy[Case]:
    @st.composite
    def draw(draw: st.DrawFn) -> Case:
        form = draw(st.sampled_from(["none", "int8", "int4", "fp8"]))
        num_chosen = draw(st.integers(1, 4))
        popular = draw(st.integers(num_chosen, 9))
        step = STEPS.get(form, 1)
        sizes = st.integers(1, 150 // step).map(lambda n: step * n)
        return Case(
            tokens=draw(st.integers(0, 12) | st.integers(13, 80)),
            num_experts=popular + draw(st.integers(0, 3)),
            num_chosen=num_chosen,
            hidden=draw(sizes),
            inner=draw(sizes),
            dtype=draw(st.sampled_from([*TOLERANCES])),
            form=form,
            gate=draw(st.sampled_from(["silu", "gelu_tanh", "swiglu_oai"])),
            has_bias=draw(st.booleans()),
            popular=popular,
            seed=draw(st.integers(0, 1 << 30)),
        )

    return draw()


@dataclass(frozen=True, eq=False)
class Mlp:
    gate_up: Linear
    down: Linear

    @property
    def weights(self) -> tuple[LinearWeight, LinearWeight] | None:
        first, second = self.gate_up.held, self.down.held
        return (first, second) if first and second else None

    def __call__(self, x: Tensor, /) -> Tensor:
        return self.down(self.gate_up(x))


def mlps(
    num_experts: int, hidden: int, inner: int, dtype: torch.dtype, form: str = "none", gate: str = "silu",
    has_bias: bool = False, popular: int | None = None, seed: int = 0,
) -> list[Mlp]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    linear = create_quantization(form, ReferenceOps()).linear

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    experts = []
    for expert in range(num_experts):
        factor = 1.0 if popular is None or expert < popular else torch.nan
        first, second = random(2 * inner, hidden) / hidden**0.5, random(hidden, inner) / inner**0.5
        biases = (random(2 * inner), random(hidden))
        first, second, *biases = ((factor * each).to(dtype).to(DEVICE) for each in (first, second, *biases))
        first_bias, second_bias = biases if has_bias else (None, None)
        experts.append(Mlp(linear(first, first_bias, gate), linear(second, second_bias)))
    return experts


def widened(experts: list[Mlp], dtype: torch.dtype) -> list[Mlp]:
    """The same weights, those in fp8 written out: by themselves they are multiplied with inputs that are rounded."""

    def wide(linear: Linear) -> Linear:
        held = linear.held
        if held is None or held.form != "fp8" or held.scales is None:
            return linear
        weight = (held.numbers.float() * held.scales[:, None]).to(dtype)
        return create_quantization("none", ReferenceOps()).linear(weight, held.bias, held.gate)

    return [Mlp(wide(expert.gate_up), wide(expert.down)) for expert in experts]


def visitors(tokens: int, popular: int, num_chosen: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, popular, generator=generator).argsort(dim=-1)[:, :num_chosen]
    return torch.rand(tokens, num_chosen, generator=generator).to(DEVICE), chosen.to(DEVICE)


def inputs(tokens: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@given(case=cases())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_random_mixtures(case: Case) -> None:
    experts = mlps(
        case.num_experts, case.hidden, case.inner, case.dtype, case.form, case.gate, case.has_bias, case.popular,
        case.seed,
    )  # fmt: skip
    shares, chosen = visitors(case.tokens, case.popular, case.num_chosen, case.seed)
    x = inputs(case.tokens, case.hidden, case.dtype, case.seed)
    triton, one_by_one = TritonOps().mixture_of_experts(experts), SequentialExperts(widened(experts, case.dtype))
    assert not triton.needs_host_sync
    ours, expected = (mixture(x, shares, chosen) for mixture in (triton, one_by_one))
    assert (ours.dtype, ours.shape) == (case.dtype, x.shape)
    # Of bfloat16, whose products are rounded between, by what the largest is.
    tolerance = TOLERANCES[case.dtype] * max(1.0, expected.abs().max().item() if case.tokens else 0.0)
    assert torch.allclose(ours.float(), expected.float(), rtol=0.0, atol=tolerance)


@given(
    tokens=st.integers(0, 12) | st.integers(13, 300), num_experts=st.integers(1, 40), num_chosen=st.integers(1, 8),
    size=st.sampled_from([16, 32]), seed=st.integers(0, 1 << 30),
)  # fmt: skip
@settings(max_examples=30, deadline=None, derandomize=True)
def test_every_visit_is_in_one_block_of_its_expert(
    tokens: int, num_experts: int, num_chosen: int, size: int, seed: int
) -> None:
    chosen = visitors(tokens, num_experts, min(num_chosen, num_experts), seed)[1].contiguous()
    if seed % 2:  # all want the last
        chosen = torch.full((tokens, 1), num_experts - 1, device=DEVICE)
    groups = triton_experts.grouped(chosen, num_experts, size)
    found: dict[int, list[int]] = {}
    for expert, visits in zip(groups.experts.tolist(), groups.visits.tolist(), strict=True):
        if expert >= 0:
            here = [visit for visit in visits if visit >= 0]
            assert here, "a block for nobody"
            assert visits == here + [-1] * (size - len(here))
            found.setdefault(expert, []).extend(here)
    of_whom = chosen.flatten().tolist()
    assert found == {expert: [i for i, each in enumerate(of_whom) if each == expert] for expert in sorted(set(of_whom))}
    assert [*found] == sorted(found)


@pytest.mark.parametrize("form", ["none", "int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_row_is_the_same_to_the_bit_beside_any_neighbours(dtype: torch.dtype, form: str) -> None:
    """In tiles of few visits and of many."""
    mixture = TritonOps().mixture_of_experts(mlps(4, 160, 96, dtype, form))
    x, (shares, chosen) = inputs(60, 160, dtype), visitors(60, 4, 3)
    assert 3 * 4 <= 4 * triton_experts.FEW[dtype].visits < 3 * 60
    together = mixture(x, shares, chosen)
    for start, end in ((0, 1), (7, 8), (59, 60), (3, 7), (20, 60)):
        assert torch.equal(mixture(x[start:end], shares[start:end], chosen[start:end]), together[start:end])


def test_fp8_says_nearly_what_it_says_with_rounded_inputs() -> None:
    experts = mlps(4, 160, 96, torch.bfloat16, "fp8")
    x, (shares, chosen) = inputs(20, 160, torch.bfloat16), visitors(20, 4, 2)
    mixture = TritonOps().mixture_of_experts(experts)
    assert not mixture.needs_host_sync
    ours, rounded = mixture(x, shares, chosen).float(), SequentialExperts(experts)(x, shares, chosen).float()
    assert (ours - rounded).norm() / rounded.norm() < 0.06
    assert not torch.equal(ours, rounded)


def test_results_are_summed_in_the_order_of_the_experts_numbers() -> None:
    mixture = TritonOps().mixture_of_experts(mlps(6, 64, 32, torch.float32))
    x, (shares, chosen) = inputs(9, 64, torch.float32), visitors(9, 6, 5)
    order = torch.tensor([3, 1, 4, 0, 2], device=DEVICE)
    assert torch.equal(mixture(x, shares, chosen), mixture(x, shares[:, order], chosen[:, order]))


def test_of_equal_scores_the_first_is_taken() -> None:
    scores = torch.tensor(
        [[1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5, [-torch.inf, 3.0, -torch.inf, -torch.inf, 4.0]], device=DEVICE
    )
    shares, chosen = TritonOps().route(scores, 4, normalise=False)
    assert chosen.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [4, 1, 0, 2]]
    assert torch.allclose(shares, scores.softmax(-1).gather(-1, chosen))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("normalise", [False, True])
def test_scores_that_are_no_numbers_choose_experts_that_there_are(bad: float, normalise: bool) -> None:
    scores = torch.zeros(3, 5, device=DEVICE)
    scores[0], scores[1, 2] = bad, bad
    shares, chosen = TritonOps().route(scores, 3, normalise)
    for row in chosen.tolist():
        assert len({*row}) == 3
        assert {*row} <= {*range(5)}
    assert shares.isnan().all(-1).tolist() == [True, bad != -torch.inf, False]


def test_nobody_is_asked_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that hold nothing refuse to tell what they hold."""
    meta = torch.device("meta")
    monkeypatch.setattr(triton_experts, "kernels", MagicMock())
    mixture = triton_experts.TritonMixtureOfExperts(
        [_on(meta, expert) for expert in mlps(4, 64, 32, torch.bfloat16, "int8")]
    )
    for tokens in (1, 64):
        shares, chosen = triton_experts.route(torch.empty(tokens, 4, device=meta), 2, normalise=True)
        x = torch.empty(tokens, 64, dtype=torch.bfloat16, device=meta)
        assert mixture(x, shares, chosen).shape == x.shape
    assert not mixture.needs_host_sync


def test_experts_are_given_up_once_they_are_copied() -> None:
    experts = mlps(3, 64, 32, torch.float32)
    held = [weakref.ref(weight.numbers) for expert in experts for weight in expert.weights or ()]
    mixture: MixtureOfExperts = TritonOps().mixture_of_experts(experts)
    assert all(reference() is not None for reference in held)
    del experts
    gc.collect()
    assert not any(reference() is not None for reference in held)
    del mixture


def test_experts_that_are_made_of_anything_else_are_asked_one_by_one() -> None:
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
        return LinearWeight(weight.form, weight.numbers.to(device), scales, None, weight.gate)

    assert expert.weights
    first, second = expert.weights
    return moved(first), moved(second)
