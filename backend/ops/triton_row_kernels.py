"""Triton kernel for linear layers of a single row, as in the decode steps of one sequence.

Such a layer takes as long as reading its weight. One program reads all inputs of BLOCK_N outputs and sums their
products in float32. The RMS norm before the layer and the gate after it are computed by the same kernel: every program
normalises the row for itself, which costs less than starting another kernel.

With WAITS, the kernel starts while the previous one still runs, and reads the first part of its weight before it waits
for the previous kernel's results (programmatic dependent launch, from compute capability 9.0 on).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from backend.ops.triton_kernels import apply_gate


@triton.jit
def _inputs(x, residual, norm_weight, places, is_place, factor, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """The layer's inputs at these places, in float32: x, or the norm of x + residual, rounded as if it were stored."""
    values = tl.load(x + places, mask=is_place, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + places, mask=is_place, other=0.0).to(tl.float32)
        values = values.to(x.dtype.element_ty).to(tl.float32)
    if HAS_NORM:
        scale = tl.load(norm_weight + places, mask=is_place, other=0.0).to(tl.float32)
        values = (values * factor * scale).to(x.dtype.element_ty).to(tl.float32)
    return values


@triton.jit
def linear_row(
    x, residual, norm_weight, weight, bias, output, total, eps,
    OUTS: tl.constexpr, INS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Multiplies one row by a weight, [OUTS, INS], or [2 * OUTS, INS] with a gate. Grid: (OUTS / BLOCK_N,).

    `total` gets x + residual. BLOCK_D: a power of two, at least INS.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = (columns < OUTS)[:, None]
    inputs = tl.arange(0, BLOCK_K)[None, :]
    source = weight + columns.to(tl.int64)[:, None] * INS + inputs
    values = tl.load(source, mask=is_column & (inputs < INS), other=0.0, eviction_policy="evict_first")
    if GATE != "":
        others = source + OUTS * INS
        ups = tl.load(others, mask=is_column & (inputs < INS), other=0.0, eviction_policy="evict_first")
    if WAITS:
        gdc_wait()
        gdc_launch_dependents()

    factor = 1.0
    if HAS_NORM:
        dims = tl.arange(0, BLOCK_D)
        whole = _inputs(x, residual, norm_weight, dims, dims < INS, 1.0, False, HAS_RESIDUAL)
        if HAS_RESIDUAL:  # noqa: SIM102  # a constant and a value
            if tl.program_id(0) == 0:
                tl.store(total + dims, whole, mask=dims < INS)
        factor = tl.rsqrt(tl.sum(whole * whole, 0) / INS + eps)

    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if GATE != "":
        up_sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, INS, BLOCK_K):
        places = start + inputs
        part = _inputs(x, residual, norm_weight, places, places < INS, factor, HAS_NORM, HAS_RESIDUAL)
        has_next = is_column & (places + BLOCK_K < INS)
        sums += values.to(tl.float32) * part
        values = tl.load(source + start + BLOCK_K, mask=has_next, other=0.0, eviction_policy="evict_first")
        if GATE != "":
            up_sums += ups.to(tl.float32) * part
            ups = tl.load(others + start + BLOCK_K, mask=has_next, other=0.0, eviction_policy="evict_first")
    result = tl.sum(sums, 1)
    is_output = columns < OUTS
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=is_output, other=0.0).to(tl.float32)
    if GATE != "":
        up = tl.sum(up_sums, 1)
        if HAS_BIAS:
            up += tl.load(bias + OUTS + columns, mask=is_output, other=0.0).to(tl.float32)
        result = apply_gate(result, up, GATE)
    tl.store(output + columns, result, mask=is_output)
