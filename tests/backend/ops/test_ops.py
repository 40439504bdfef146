"""Every member of `Ops` against the formulas in double precision."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from backend.kv_cache import create_kv_format
from backend.ops.base import INT4_GROUP, LARGEST_FP8, HeadNorms, Ops
from backend.ops.int4 import SCALE_ENDS
from backend.ops.reference import ReferenceOps
from backend.triton_runtime import HAS_TRITON, is_interpreted
from tests.backend.ops.conftest import TOLERANCES, random

TRITON: tuple[type, ...] = (import_module("backend.ops.triton").TritonOps,) if HAS_TRITON else ()


def assert_close(ours: Tensor, exact: Tensor, tolerance: float | None = None) -> None:
    assert ours.shape == exact.shape
    assert (ours.double() - exact).abs().max().item() < (tolerance or TOLERANCES[ours.dtype])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(ops: Ops, dtype: torch.dtype, with_bias: bool) -> None:
    x, weight, bias = random(5, 32, dtype=dtype), random(7, 32, dtype=dtype, seed=1) / 8, random(7, dtype=dtype, seed=2)
    exact = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    assert_close(ops.linear(x, weight, bias if with_bias else None), exact)


# Few rows and many, whole AMX tiles and remainders, inputs that are not a whole number of vectors.
SHAPES = [(1, 32, 7), (2, 64, 33), (5, 96, 32), (16, 128, 80), (17, 40, 50), (64, 64, 64), (70, 96, 31)]


@pytest.mark.parametrize(("rows", "ins", "outs"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_of_any_shape(ops: Ops, dtype: torch.dtype, rows: int, ins: int, outs: int, with_bias: bool) -> None:
    x = random(rows, 2 * ins, dtype=dtype)[:, ins:]  # rows with a stride, as in a part of a projection
    weight, bias = random(outs, ins, dtype=dtype, seed=1) / ins**0.5, random(outs, dtype=dtype, seed=2)
    exact = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    assert_close(ops.linear(x, weight, bias if with_bias else None), exact)


@pytest.mark.parametrize(("rows", "ins", "outs"), SHAPES)
def test_linear_int8(ops: Ops, dtype: torch.dtype, rows: int, ins: int, outs: int) -> None:
    x, bias = random(rows, ins, dtype=dtype), random(outs, dtype=dtype, seed=2)
    weight = torch.randint(-127, 128, (outs, ins), generator=torch.Generator().manual_seed(3)).to(torch.int8)
    scales = torch.linspace(0.5, 1.0, outs) / 127 / ins**0.5
    exact = x.double() @ (weight.double() * scales.double()[:, None]).T + bias.double()
    assert_close(ops.linear_int8(x, weight, scales, bias), exact)


INT4_SHAPES = [*(shape for shape in SHAPES if shape[1] % INT4_GROUP == 0), (3, 96, 32), (300, 1024, 160)]


@pytest.mark.parametrize(("rows", "ins", "outs"), INT4_SHAPES)
def test_linear_int4(ops: Ops, dtype: torch.dtype, rows: int, ins: int, outs: int) -> None:
    x, bias = random(rows, ins, dtype=dtype), random(outs, dtype=dtype, seed=2)
    numbers = torch.randint(-8, 8, (outs, ins), generator=torch.Generator().manual_seed(3))
    scales = (torch.rand(outs, ins // INT4_GROUP, generator=torch.Generator().manual_seed(4)) / 8 / ins**0.5).bfloat16()
    packed = torch.empty(outs, ins // 2, dtype=torch.uint8)
    for i in range(ins):  # one code at a time, as the interface's docstring says
        group, place = divmod(i, INT4_GROUP)
        byte = group * INT4_GROUP // 2 + place % (INT4_GROUP // 2)
        if place < INT4_GROUP // 2:
            packed[:, byte] = numbers[:, i] + 8
        else:
            packed[:, byte] |= (numbers[:, i] + 8).to(torch.uint8) << 4
    weight = numbers.double() * scales.double().repeat_interleave(INT4_GROUP, dim=1)
    exact = x.double() @ weight.T + bias.double()
    assert_close(ops.linear_int4(x, packed, scales, bias), exact)
    assert_close(ops.linear_int4(x, ops.pack_int4(packed, scales, dtype), scales, bias), exact)


@pytest.mark.parametrize(("outs", "ins"), [(1, 32), (7, 96), (300, 2048)])
def test_int4_weights_have_the_smallest_error_of_all_scales_tried(
    ops: Ops, dtype: torch.dtype, outs: int, ins: int
) -> None:
    """With sums in another order, another scale may be as good, so the error is compared."""
    weight = random(outs, ins, dtype=dtype) * torch.logspace(-6, 3, outs)[:, None].to(dtype)
    weight[-1, :32], weight[0, 3] = 0, 7.0 * weight[0].abs().max()
    numbers, scales = ops.to_int4(weight)
    assert (numbers.shape, scales.shape, scales.dtype) == ((outs, ins // 2), (outs, ins // 32), torch.bfloat16)
    groups = weight.double().view(outs, -1, 32)

    def errors(numbers: Tensor, scales: Tensor) -> Tensor:
        bytes_of_groups = numbers.view(outs, -1, 16)
        whole = torch.cat((bytes_of_groups & 15, bytes_of_groups >> 4), dim=-1).double() - 8
        return (whole * scales.double()[..., None] - groups).square().sum(-1)

    best = torch.full_like(groups[..., 0], torch.inf)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).float()
    for end in SCALE_ENDS:
        scale = (largest / end).bfloat16().double()
        inverse = torch.where(scale == 0, 0, 1 / scale)
        best = best.minimum(((groups * inverse).round().clamp(-8, 7) * scale - groups).square().sum(-1))
    assert (errors(numbers, scales) <= best * (1 + 1e-4)).all()


@pytest.mark.parametrize(("rows", "ins", "outs"), INT4_SHAPES)
def test_linear_mxfp4(ops: Ops, dtype: torch.dtype, rows: int, ins: int, outs: int) -> None:
    x, bias = random(rows, ins, dtype=dtype), random(outs, dtype=dtype, seed=2)
    codes = torch.randint(0, 16, (outs, ins // INT4_GROUP, INT4_GROUP), generator=torch.Generator().manual_seed(3))
    exponents = torch.randint(-3, 1, (outs, ins // INT4_GROUP), generator=torch.Generator().manual_seed(4))
    scales = torch.ldexp(torch.full(exponents.shape, 2.0**-6), exponents).bfloat16()
    first, second = codes.to(torch.uint8).chunk(2, dim=-1)
    packed = (first | second << 4).flatten(1)
    numbers = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0], dtype=torch.float64)
    weight = (torch.cat((numbers, -numbers))[codes] * scales.double()[..., None]).flatten(1)
    exact = x.double() @ weight.T + bias.double()
    tolerance = TOLERANCES[dtype] * max(1.0, exact.abs().max().item() / 4)
    for weight in (packed, ops.pack_int4(packed, scales, dtype)):
        assert (ops.linear_mxfp4(x, weight, scales, bias).double() - exact).abs().max().item() < tolerance


# Whole panels of a packed weight, for one row and for so many that x is processed in parts, not all of them full.
PACKED_SHAPES = [
    *((1, 32, 32), (1, 64, 96), (2, 34, 64), (7, 900, 64), (15, 128, 64), (16, 64, 32), (17, 192, 96)),
    *((33, 64, 64), (80, 1100, 96), (300, 2048, 64)),
]
GATES = (None, "silu", "gelu_tanh", "swiglu_oai")


def gated(x: Tensor, gate: str | None) -> Tensor:
    if gate is None:
        return x
    first, second = x.chunk(2, -1)
    if gate == "swiglu_oai":
        first, second = first.clamp(max=7.0), second.clamp(-7.0, 7.0)
        return (second + 1) * first * torch.sigmoid(1.702 * first)
    return second * (F.silu(first) if gate == "silu" else F.gelu(first, approximate="tanh"))


@pytest.mark.parametrize(("rows", "ins", "outs"), PACKED_SHAPES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_packed(
    ops: Ops, dtype: torch.dtype, rows: int, ins: int, outs: int, gate: str | None, with_bias: bool
) -> None:
    x = random(rows, 2 * ins, dtype=dtype)[:, ins:]
    weight, bias = random(outs, ins, dtype=dtype, seed=1) / ins**0.5 / 4, random(outs, dtype=dtype, seed=2) / 4
    exact = gated(x.double() @ weight.double().T + (bias.double() if with_bias else 0.0), gate)
    assert_close(ops.linear(x, ops.pack(weight, dtype, gate), bias if with_bias else None, gate), exact)


@pytest.mark.parametrize(("rows", "ins", "outs"), PACKED_SHAPES)
@pytest.mark.parametrize("gate", GATES)
def test_linear_int8_packed(ops: Ops, dtype: torch.dtype, rows: int, ins: int, outs: int, gate: str | None) -> None:
    x, bias = random(rows, ins, dtype=dtype), random(outs, dtype=dtype, seed=2) / 4
    weight = torch.randint(-127, 128, (outs, ins), generator=torch.Generator().manual_seed(3)).to(torch.int8)
    scales = torch.linspace(0.5, 1.0, outs) / 127 / ins**0.5 / 4
    exact = gated(x.double() @ (weight.double() * scales.double()[:, None]).T + bias.double(), gate)
    assert_close(ops.linear_int8(x, ops.pack(weight, dtype, gate), scales, bias, gate), exact)


@pytest.mark.parametrize("outs", [64, 70])
def test_embedding_of_a_packed_weight(ops: Ops, dtype: torch.dtype, outs: int) -> None:
    weight, ids = random(outs, 96, dtype=dtype), torch.tensor([5, 0, outs - 1, 17, 33, 5])
    assert torch.equal(ops.embedding(ids, ops.pack(weight, dtype)), weight[ids])


@pytest.mark.parametrize("width", [3, 96, 5000])
def test_gather_rows_of_a_table(ops: Ops, dtype: torch.dtype, width: int) -> None:
    table, ids = random(40, width, dtype=dtype), torch.tensor([[5, 1], [0, 1], [39, 1], [5, 1]])[:, 0]
    assert torch.equal(ops.gather(table, ids), table[ids])
    assert torch.equal(ops.embedding(ids, table), table[ids])


@pytest.mark.parametrize("width", [3, 96, 5000])
def test_scale_rounds_once(ops: Ops, dtype: torch.dtype, width: int) -> None:
    x, factor = random(5, 2 * width, dtype=dtype)[:, :width], torch.tensor(768**0.5, dtype=dtype)
    assert torch.equal(ops.scale(x, factor.item()), (x.double() * factor.double()).to(dtype))


def test_an_unknown_gate(ops: Ops) -> None:
    with pytest.raises(ValueError, match="swish"):
        ops.gated(torch.ones(1, 2), "swish")


@pytest.mark.parametrize("shape", [(5, 32), (5, 3, 16), (5, 41)])
def test_rms_norm(ops: Ops, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    assert_close(ops.rms_norm(x, weight, 1e-6), rms_norm(x.double(), weight.double(), 1e-6))
    tiny = x * 1e-3  # eps matters for such inputs
    assert_close(ops.rms_norm(tiny, weight, 1e-6), rms_norm(tiny.double(), weight.double(), 1e-6))


def test_add_rms_norm(ops: Ops, dtype: torch.dtype) -> None:
    x, residual, weight = (random(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(5, 32), (5, 32), (32,)]))
    before = x.clone(), residual.clone()
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert_close(total, x.double() + residual.double())
    assert_close(normed, rms_norm(total.double(), weight.double(), 1e-6))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


# Rows of one part and of several, and outputs that are not a whole number of blocks.
@pytest.mark.parametrize(("rows", "ins", "outs"), [(1, 32, 7), (1, 48, 34), (1, 2064, 10), (3, 32, 8)])
@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh", "swiglu_oai"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_linear_after_a_norm(
    ops: Ops, dtype: torch.dtype, rows: int, ins: int, outs: int, gate: str | None, with_residual: bool
) -> None:
    if gate and outs % 2:
        outs += 1
    x, norm_weight = random(rows, ins, dtype=dtype), random(ins, dtype=dtype, seed=1)
    residual = random(rows, ins, dtype=dtype, seed=2) if with_residual else None
    weight, bias = random(outs, ins, dtype=dtype, seed=3) / ins**0.5, random(outs, dtype=dtype, seed=4)
    fused = ops.norm_linear(x, residual, norm_weight, 1e-6, weight, bias, gate)
    if fused is None:  # not computed at once by this member, or for this number of rows
        assert not (isinstance(ops, TRITON) and rows == 1)
        return
    reference = ReferenceOps()
    total = (x.double() + (residual.double() if residual is not None else 0)).to(dtype)
    normed = rms_norm(total.double(), norm_weight.double(), 1e-6).to(dtype)
    exact = reference.linear(normed.double(), weight.double(), bias.double(), gate)
    size = 1.0 + exact.abs()  # gated results can be large
    assert_close(fused[0].double() / size, exact / size, TOLERANCES[dtype])
    assert_close(ops.linear(normed, weight, bias, gate).double() / size, exact / size, TOLERANCES[dtype])
    assert_close(fused[1], total.double())


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dim", [48, 1024])
def test_a_norm_rounded_to_fp8(ops: Ops, dtype: torch.dtype, dim: int, with_residual: bool) -> None:
    x, weight = random(5, dim, dtype=dtype), random(dim, dtype=dtype, seed=1)
    x[1] = 0
    residual = random(5, dim, dtype=dtype, seed=2) if with_residual else None
    values, scales, total = ops.norm_round_to_fp8(x, residual, weight, 1e-6)
    exact = x.double() + (residual.double() if residual is not None else 0.0)
    assert_close(total, exact)
    normed = rms_norm(total.double(), weight.double(), 1e-6)
    assert (values.dtype, scales.shape) == (torch.float8_e4m3fn, (5, 1))
    assert_close(scales.double() * LARGEST_FP8, normed.abs().amax(1, keepdim=True).clamp(min=1e-27), 0.1)
    if not (isinstance(ops, TRITON) and is_interpreted()):  # whose rounding to fp8 is not that of a GPU
        error = (values.double() * scales.double() - normed).abs()
        assert (error <= normed.abs() * 2**-4 + normed.abs().amax(1, keepdim=True) * 2**-7 + 1e-30).all()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # by Triton's interpreter
@pytest.mark.parametrize("gate", GATES[1:])
@pytest.mark.parametrize("inner", [48, 5000])  # of which a program computes the larger one in two parts
def test_a_gate_rounded_to_fp8(ops: Ops, dtype: torch.dtype, inner: int, gate: str) -> None:
    x = random(3, 2 * inner, dtype=dtype) * 3
    x[1] = 0
    values, scales = ops.gate_round_to_fp8(x, gate)
    exact = ops.gated(x, gate).double()
    assert (values.dtype, values.shape, scales.shape) == (torch.float8_e4m3fn, (3, inner), (3, 1))
    peaks = exact.abs().amax(1, keepdim=True)
    assert ((scales.double() * LARGEST_FP8 - peaks).abs() <= 0.01 * peaks + 1e-26).all()
    if not (isinstance(ops, TRITON) and is_interpreted()):  # whose rounding to fp8 is not that of a GPU
        error = (values.double() * scales.double() - exact).abs()
        assert (error <= exact.abs() * 2**-4 + peaks * 2**-7 + 1e-30).all()


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates the first dimensions, two for each angle."""
    if not (dim := 2 * angles.shape[1]):
        return x.double()
    first, second = x[..., :dim].double().chunk(2, dim=-1)
    rotated_pairs = torch.complex(first, second) * torch.polar(torch.ones(()).double(), angles.double()[:, None])
    return torch.cat((rotated_pairs.real, rotated_pairs.imag, x[..., dim:].double()), dim=-1)


def test_rope(ops: Ops, dtype: torch.dtype) -> None:
    x, angles = random(6, 3, 8, dtype=dtype), random(6, 4, dtype=torch.float32, seed=1) * 3
    assert_close(ops.rope(x, angles.cos(), angles.sin()), rotated(x, angles))


@pytest.mark.parametrize("rotary_dim", [0, 6, 30])
def test_rope_of_the_first_dimensions(ops: Ops, dtype: torch.dtype, rotary_dim: int) -> None:
    x, angles = random(6, 3, 80, dtype=dtype)[..., :40], random(6, rotary_dim // 2, dtype=torch.float32, seed=1) * 3
    ours = ops.rope(x, angles.cos(), angles.sin())
    assert_close(ours, rotated(x, angles))
    assert torch.equal(ours[..., rotary_dim:], x[..., rotary_dim:])


def test_add(ops: Ops, dtype: torch.dtype) -> None:
    x, y = random(5, 90, dtype=dtype)[:, :45], random(5, 45, dtype=dtype, seed=1)
    assert torch.equal(ops.add(x, y), (x.double() + y.double()).to(dtype))


def test_silu_mul(ops: Ops, dtype: torch.dtype) -> None:
    gate_up = random(5, 24, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    assert_close(ops.silu_mul(gate_up), gate * torch.sigmoid(gate) * up)


def test_gelu_mul(ops: Ops, dtype: torch.dtype) -> None:
    gate_up = random(5, 24, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    gelu = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    assert_close(ops.gelu_mul(gate_up), gelu * up)


def test_swiglu_oai(ops: Ops, dtype: torch.dtype) -> None:
    gate_up = random(5, 66, dtype=dtype) * 6  # some beyond the limits, on both sides
    gate, up = gate_up.double().chunk(2, -1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    exact = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    assert (ops.swiglu_oai(gate_up).double() - exact).abs().max().item() < TOLERANCES[
        dtype
    ] * 64  # the largest result is 56
    assert ops.swiglu_oai(torch.full_like(gate_up, torch.nan)).isnan().all()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # by Triton's interpreter
def test_activations_of_large_inputs(ops: Ops, dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e4, -200.0, -90.0, 90.0, 200.0, 1e4], dtype=dtype)
    gate_up = torch.cat((gate, torch.ones_like(gate)))[None]
    expected = gate.clamp(min=0).double()[None]
    assert_close(ops.silu_mul(gate_up), expected)
    assert_close(ops.gelu_mul(gate_up), expected)


def test_rms_norm_with_a_float32_weight(ops: Ops) -> None:
    x, weight = random(5, 32, dtype=torch.bfloat16), random(32, dtype=torch.float32, seed=1)
    assert_close(ops.rms_norm(x, weight, 1e-6), rms_norm(x.double(), weight.double(), 1e-6))


@pytest.mark.parametrize(("dim", "rotary_dim"), [(8, 8), (64, 64), (80, 80), (40, 30), (64, 0)])
@pytest.mark.parametrize("norm_dtype", [None, torch.float32, torch.bfloat16])
def test_norm_rope_store(
    ops: Ops, dtype: torch.dtype, dim: int, rotary_dim: int, norm_dtype: torch.dtype | None
) -> None:
    tokens, heads, kv_heads = 3, 4, 2
    qkv, slots = random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype), torch.tensor([19, 0, 6])
    if norm_dtype is torch.bfloat16 and dtype is torch.float32:
        norm_dtype = torch.float32
    weights = [random(dim, dtype=norm_dtype or dtype, seed=i) for i in (1, 2)]
    norms = HeadNorms(weights[0], weights[1], 1e-6) if norm_dtype else None
    angles = random(tokens, rotary_dim // 2, dtype=torch.float32, seed=3) * 3
    caches = torch.zeros(5, 4, kv_heads, dim, dtype=dtype), torch.zeros(5, 4, kv_heads, dim, dtype=dtype)

    query = ops.norm_rope_store(qkv, norms, (angles.cos(), angles.sin()), caches, slots)

    queries, keys, values = qkv.view(tokens, -1, dim).double().split([heads, kv_heads, kv_heads], dim=1)
    if norms:
        queries, keys = rms_norm(queries, weights[0].double(), 1e-6), rms_norm(keys, weights[1].double(), 1e-6)
    assert_close(query, rotated(queries, angles))
    stored = torch.zeros(20, kv_heads, dim, dtype=torch.float64)
    stored[slots] = rotated(keys, angles)
    assert_close(caches[0].flatten(0, 1), stored)
    stored[slots] = values
    assert torch.equal(caches[1].flatten(0, 1).double(), stored)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("scales_apart", [False, True])
@pytest.mark.parametrize("dim", [8, 80])
def test_norm_rope_store_in_every_cache_format(
    ops: Ops, dtype: torch.dtype, kv_cache_dtype: str, scales_apart: bool, dim: int
) -> None:
    """Values are equal byte for byte, because nothing computed before could be rounded differently."""
    kv_format, tokens, kv_heads = create_kv_format(kv_cache_dtype, scales_apart=scales_apart), 40, 2
    qkv = random(tokens, 5 * dim, dtype=dtype) * torch.logspace(-3, 3, tokens)[:, None].to(dtype)
    qkv[3], qkv[4, dim * 3] = 0, torch.nan
    angles = random(tokens, dim // 2, dtype=torch.float32, seed=3) * 3
    rope = (angles.cos(), angles.sin())
    key_cache, value_cache = torch.zeros(2, 11, 4, kv_heads, kv_format.width(dim), dtype=torch.int8).unbind()
    slots = torch.randperm(44, generator=torch.Generator().manual_seed(0))[:tokens]

    query = ops.norm_rope_store(qkv, None, rope, (key_cache, value_cache), slots, kv_format)

    heads = qkv.view(tokens, -1, dim)
    assert_close(query[:3], rotated(heads[:3, :1], angles[:3]))
    is_finite, blocks = torch.arange(tokens) != 4, torch.arange(11)
    assert kv_format.load(value_cache, blocks, dtype)[slots][4, :1].isnan().all()
    expected = torch.zeros_like(value_cache)
    kv_format.store(heads[:, 3:], expected, slots)
    for cache in (value_cache, expected):  # the bytes of NaN are not defined
        kv_format.store(torch.ones(1, kv_heads, dim, dtype=dtype), cache, slots[4:5])
    assert torch.equal(value_cache, expected)
    keys, exact = kv_format.load(key_cache, blocks, torch.float32)[slots], rotated(heads[:, 1:3], angles)
    step = exact.abs().amax(-1, keepdim=True) * (1 / 127 if kv_cache_dtype == "int8" else 2**-4) + exact.abs() * 2**-7
    assert ((keys - exact).abs() <= step)[is_finite].all()
    kv_format.store(torch.zeros(tokens, kv_heads, dim, dtype=dtype), key_cache, slots)
    unwritten = torch.zeros_like(key_cache)
    kv_format.store(torch.zeros(tokens, kv_heads, dim, dtype=dtype), unwritten, slots)
    assert torch.equal(key_cache, unwritten)


def test_store_kv_writes_only_the_slots(ops: Ops, dtype: torch.dtype) -> None:
    key, value = random(3, 2, 8, dtype=dtype), random(3, 2, 8, dtype=dtype, seed=1)
    # As from a layer: slices of one projection, not contiguous.
    qkv = torch.cat((random(3, 4, 8, dtype=dtype), key, value), dim=1)
    key_cache, value_cache = (torch.zeros(5, 4, 2, 8, dtype=dtype) for _ in range(2))
    ops.store_kv(qkv[:, 4:6], qkv[:, 6:8], key_cache, value_cache, torch.tensor([19, 0, 6]))
    for cache, rows in ((key_cache, key), (value_cache, value)):
        assert torch.equal(cache[[4, 0, 1], [3, 0, 2]], rows)
        assert cache.count_nonzero() == rows.count_nonzero()


@pytest.mark.parametrize("factor", [1.0, 0.07])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("vocab_size", [7, 1000, 40_000])
def test_logits(ops: Ops, dtype: torch.dtype, vocab_size: int, factor: float, softcap: float | None) -> None:
    x = random(3, vocab_size, dtype=dtype) * 100
    exact = x.double() * factor
    if softcap:
        exact = softcap * torch.tanh(exact / softcap)
    ours = ops.logits(x, factor, softcap)
    assert ours.dtype is torch.float32
    assert (ours.double() - exact).abs().max().item() < 1e-4


# Less than a vector, whole vectors, and sizes that end inside a chunk.
VOCAB_SIZES = [1, 7, 16, 255, 256, 257, 1000]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_argmax_is_the_first_of_the_largest(ops: Ops, dtype: torch.dtype, vocab_size: int) -> None:
    logits = random(40, vocab_size, dtype=dtype).round(decimals=1)  # many are equal
    logits[30] = 1.0
    logits[31] = -torch.inf
    logits[32:, -1] = torch.inf
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert ops.argmax(logits).tolist() == expected
    logits[::2, vocab_size // 2 :] = torch.nan
    assert ops.argmax(logits).tolist() == [e if i % 2 else vocab_size // 2 for i, e in enumerate(expected)]
