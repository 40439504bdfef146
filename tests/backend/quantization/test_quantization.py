"""Quantised weights: close to the original, and the same result from every member of `Ops`."""

from __future__ import annotations

import pytest
import torch

from backend.engine.errors import WeightsError
from backend.layers.mlp import Mlp
from backend.model_files.mxfp4 import Mxfp4Tensor
from backend.ops import create_ops
from backend.ops.reference import ReferenceOps
from backend.quantization import create_quantization
from backend.quantization.mxfp4 import Mxfp4Linear

# The relative error of a normally distributed weight.
ERRORS = {"none": 0.0, "int8": 0.01, "int4": 0.085, "fp8": 0.03}


def weight(outs: int = 48, ins: int = 256) -> torch.Tensor:
    return torch.randn(outs, ins, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ERRORS)
def test_the_quantised_weight_is_close_to_the_original(name: str) -> None:
    linear = create_quantization(name, ReferenceOps()).linear(weight(), None)
    dequantised = linear(torch.eye(256)).T  # [out, in]
    assert (dequantised - weight()).norm() / weight().norm() <= ERRORS[name]


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_original_weight_is_not_changed(name: str, dtype: torch.dtype) -> None:
    """A tied head is made from the embedding, which is still used."""
    original = weight().to(dtype)
    create_quantization(name, ReferenceOps()).linear(original, None)
    assert torch.equal(original, weight().to(dtype))


@pytest.mark.parametrize("name", ERRORS)
def test_a_weight_of_zeros_stays_zero(name: str) -> None:
    bias = torch.arange(16.0)
    linear = create_quantization(name, ReferenceOps()).linear(torch.zeros(16, 64), bias)
    assert torch.equal(linear(torch.ones(2, 64)), bias.expand(2, -1))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_representable_weights_are_exact(name: str) -> None:
    """Values of the format times a scale that is found, because the largest value is at the end of its range."""
    largest = 127 if name == "int8" else -8
    values = torch.randint(-7, 8, (16, 64), generator=torch.Generator().manual_seed(1)).float()
    values[:, ::32] = largest
    linear = create_quantization(name, ReferenceOps()).linear(values * 0.25, None)
    assert torch.equal(linear(torch.eye(64)).T, values * 0.25)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_native_and_reference_agree(name: str) -> None:
    x = torch.randn(80, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    native, reference = (
        create_quantization(name, create_ops(ops)).linear(weight().bfloat16(), None) for ops in ("native", "reference")
    )
    for rows in (1, 3, 16, 80):
        ours, theirs = native(x[:rows]).float(), reference(x[:rows]).float()
        assert (ours - theirs).abs().max() < 0.02 * theirs.abs().max()


def test_int4_rejects_rows_of_incomplete_groups() -> None:
    with pytest.raises(WeightsError, match="multiples of 32, but a weight has 40"):
        create_quantization("int4", ReferenceOps()).linear(torch.zeros(4, 40), None)


def test_products_of_fp8_are_those_of_rounded_inputs() -> None:
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    linear = create_quantization("fp8", ReferenceOps()).linear(weight().bfloat16(), None)
    dequantised = linear(torch.eye(256).bfloat16()).T
    scales = x.abs().amax(1, keepdim=True).float() / 448.0
    rounded = (x / scales).to(torch.float8_e4m3fn).float() * scales
    assert (linear(x) - rounded @ dequantised.float().T).abs().max() < 0.02 * linear(x).abs().max()
    assert linear(x).dtype is torch.bfloat16
    assert torch.equal(linear(torch.zeros(2, 256)), torch.zeros(2, 48))


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "swiglu_oai"])
def test_an_fp8_layer_applies_the_gate_of_the_one_before_it(gate: str) -> None:
    quantization, x = create_quantization("fp8", ReferenceOps()), torch.linspace(-2, 2, 3 * 256).view(3, 256).bfloat16()
    gate_up = quantization.linear(weight(outs=96).bfloat16(), torch.linspace(-1, 1, 96).bfloat16(), gate)
    down = quantization.linear(weight(outs=32)[:, :48].bfloat16(), None)
    ungated, gating = gate_up.pass_gate_to(down)
    assert ungated(x).shape == (3, 96)
    assert torch.equal(gating(ungated(x)), down(gate_up(x)))
    mlp = Mlp(gate_up, down)
    assert torch.equal(mlp(x), down(gate_up(x)))
    assert mlp.weights
    assert mlp.weights[0].gate == gate  # for a mixture of experts


def test_a_gate_is_only_passed_to_a_layer_that_rounds_its_inputs() -> None:
    fp8, plain = (create_quantization(name, ReferenceOps()) for name in ("fp8", "none"))
    gate_up, down = fp8.linear(weight(outs=96).bfloat16(), None, "silu"), plain.linear(weight(outs=32)[:, :48], None)
    assert gate_up.pass_gate_to(down) == (gate_up, down)
    assert down.pass_gate_to(gate_up) == (down, gate_up)
    assert fp8.linear(weight(outs=48).bfloat16(), None).pass_gate_to(gate_up)[1] is gate_up


def test_fp8_does_not_quantise_a_small_router() -> None:
    router = create_quantization("fp8", ReferenceOps()).linear(weight(outs=6), None)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(3))
    assert torch.equal(router(x), x @ weight(outs=6).T)


class Mxfp4Ops(ReferenceOps):
    reads_mxfp4 = True


def in_mxfp4(scales: list[int], outs: int = 12, dtype: torch.dtype = torch.float32) -> Mxfp4Tensor:
    """A weight with every code, and random ones."""
    codes = torch.randint(0, 256, (outs, 16 * len(scales)), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    codes[0] = torch.arange(16, dtype=torch.uint8).mul(17).repeat(len(scales))
    return Mxfp4Tensor(codes, torch.tensor([scales] * outs, dtype=torch.uint8), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", [None, "swiglu_oai"])
def test_mxfp4_is_bitwise_its_dequantised_weight(dtype: torch.dtype, gate: str | None) -> None:
    """With torch. It is kept in MXFP4 only without another quantization, and if `Ops` reads it."""
    weight, ops = in_mxfp4([120, 127, 125], dtype=dtype), Mxfp4Ops()
    bias, x = torch.linspace(-1, 1, 12).to(dtype), torch.linspace(-3, 3, 5 * 96).view(5, 96).to(dtype)
    linear = create_quantization("none", ops).linear(weight, bias, gate)
    assert isinstance(linear, Mxfp4Linear)
    assert torch.equal(linear(x), ops.linear(x, weight.dequantize(), bias, gate))
    for name, other_ops in (("none", ReferenceOps()), ("int8", ops), ("int4", ops)):
        other = create_quantization(name, other_ops)
        assert torch.equal(other.linear(weight, bias, gate)(x), other.linear(weight.dequantize(), bias, gate)(x))
        assert not isinstance(other.linear(weight, bias, gate), Mxfp4Linear)


@pytest.mark.parametrize("scale", [0, 1, 252])
def test_the_smallest_and_the_largest_scales_of_mxfp4(scale: int) -> None:
    weight = in_mxfp4([scale])
    assert torch.equal(Mxfp4Linear(ReferenceOps(), weight, None, None)(torch.eye(32)).T, weight.dequantize())
    assert weight.dequantize().abs().max().item() == 6 * 2.0 ** (scale - 127)


def test_a_nan_scale_of_mxfp4_gives_nan() -> None:
    weight = in_mxfp4([255])
    assert weight.dequantize().isnan().all()
    assert Mxfp4Linear(ReferenceOps(), weight, None, None)(torch.ones(1, 32)).isnan().all()
