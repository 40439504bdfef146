"""Triton kernels for norms, rotary embeddings, gates, storing keys and values, and layers with quantised weights.

Each fused kernel reads its input once and writes its result once. One program computes a row, so the row's result is
the same in every batch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from backend.kv_cache.scaled import SMALLEST_SCALE
from backend.ops.base import SWIGLU_OAI_LIMIT, SWIGLU_OAI_SLOPE

LIMIT, SLOPE = tl.constexpr(SWIGLU_OAI_LIMIT), tl.constexpr(SWIGLU_OAI_SLOPE)
PLAIN, INT8, FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # formats of the cache, as in backend.kv_cache
SMALLEST = tl.constexpr(SMALLEST_SCALE)
ROUNDING = tl.constexpr(1.5 * 2.0**23)  # added to a small float32 and subtracted, it leaves the nearest integer


@triton.jit
def rms_norm(
    x, residual, weight, output, total, x_stride, eps, INNER: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Computes the RMS norm of x, or of x + residual.

    x has rows of INNER vectors of DIM numbers. The rows are `x_stride` apart. All other tensors are contiguous.
    Grid: (rows * INNER,).
    """
    vector = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < DIM
    values = tl.load(x + vector // INNER * x_stride + vector % INNER * DIM + columns, mask=is_column, other=0.0)
    values = values.to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + vector * DIM + columns, mask=is_column, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + vector * DIM + columns, rounded, mask=is_column)
        values = rounded.to(tl.float32)  # the norm is of the rounded sum, because the residual is rounded
    factor = tl.rsqrt(tl.sum(values * values, 0) / DIM + eps)
    scale = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(output + vector * DIM + columns, values * factor * scale, mask=is_column)


@triton.jit
def rope(
    x, cos, sin, output, x_stride, head_stride, NUM_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Applies the rotary embedding. x: [T, NUM_HEADS, 2 * HALF]; cos, sin: [T, HALF] float32. Grid: (T,)."""
    token = tl.program_id(0).to(tl.int64)
    heads, columns = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK)[None, :]
    is_place = (heads < NUM_HEADS) & (columns < HALF)
    source = x + token * x_stride + heads * head_stride + columns
    target = output + (token * NUM_HEADS + heads) * 2 * HALF + columns
    first = tl.load(source, mask=is_place, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=is_place, other=0.0).to(tl.float32)
    angle_cos = tl.load(cos + token * HALF + columns, mask=columns < HALF, other=0.0)
    angle_sin = tl.load(sin + token * HALF + columns, mask=columns < HALF, other=0.0)
    tl.store(target, first * angle_cos - second * angle_sin, mask=is_place)
    tl.store(target + HALF, second * angle_cos + first * angle_sin, mask=is_place)


@triton.jit
def _store_rows(
    cache, slot, head, first, second, columns, is_head, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr, LARGEST: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Stores both halves of heads of one token in its slot of a cache, as `KvFormat.store` does, with scales apart.

    head: [H, 1]. LARGEST: `limit` of the format. ROUNDED: the dtype to which numbers are rounded before they are
    encoded.
    """
    block = cache + slot // BLOCK_SIZE * (BLOCK_SIZE * NUM_KV_HEADS * WIDTH)
    offset = slot % BLOCK_SIZE
    target = block + (offset * NUM_KV_HEADS + head) * (2 * HALF) + columns
    is_place = is_head & (columns < HALF)
    if FORMAT == PLAIN:
        tl.store(target, first, mask=is_place)
        tl.store(target + HALF, second, mask=is_place)
    else:
        first = tl.where(is_place, first.to(ROUNDED).to(tl.float32), 0.0)
        second = tl.where(is_place, second.to(ROUNDED).to(tl.float32), 0.0)
        peak = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)
        # NaN and inf make the whole row NaN; tl.max ignores NaN.
        scale = tl.div_rn(peak + tl.sum(0.0 * first + 0.0 * second, 1), LARGEST)[:, None]
        scale = tl.where(scale < SMALLEST, SMALLEST, scale)
        first, second = tl.div_rn(first, scale), tl.div_rn(second, scale)
        if FORMAT == INT8:
            first, second = (first + ROUNDING) - ROUNDING, (second + ROUNDING) - ROUNDING
            tl.store(target, tl.where(first == first, first, 0.0).to(tl.int8), mask=is_place)
            tl.store(target + HALF, tl.where(second == second, second, 0.0).to(tl.int8), mask=is_place)
        else:
            tl.store(target, first.to(tl.float8e4nv).to(tl.int8, bitcast=True), mask=is_place)
            tl.store(target + HALF, second.to(tl.float8e4nv).to(tl.int8, bitcast=True), mask=is_place)
        scales = (block + BLOCK_SIZE * NUM_KV_HEADS * 2 * HALF).to(tl.pointer_type(tl.float32))
        tl.store(scales + head * BLOCK_SIZE + offset, scale, mask=is_head)


@triton.jit
def norm_rope_store(
    qkv, query_norm, key_norm, cos, sin, query, key_cache, value_cache, slots, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, HAS_NORMS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr, LARGEST: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Computes `Ops.norm_rope_store`. One program normalises, rotates and stores BLOCK_H heads of one token.

    Grid: (T, heads / BLOCK_H), where the heads are those of queries, then of keys, then of values. WIDTH: numbers
    in a row of the cache. WAITS: as in `triton_row_kernels.py`.
    """
    if WAITS:
        gdc_wait()
        gdc_launch_dependents()
    ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    is_column = columns < HALF
    is_place = is_column & (head < ALL_HEADS)
    is_query, is_value = head < NUM_HEADS, head >= NUM_HEADS + NUM_KV_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    source = qkv + (token * ALL_HEADS + head) * 2 * HALF + columns
    first = tl.load(source, mask=is_place, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=is_place, other=0.0).to(tl.float32)
    if HAS_NORMS:
        factor = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)[:, None]
        for_queries = tl.load(query_norm + columns, mask=is_column, other=0.0).to(tl.float32)
        for_keys = tl.load(key_norm + columns, mask=is_column, other=0.0).to(tl.float32)
        first = tl.where(is_value, first, first * factor * tl.where(is_query, for_queries, for_keys))
        for_queries = tl.load(query_norm + HALF + columns, mask=is_column, other=0.0).to(tl.float32)
        for_keys = tl.load(key_norm + HALF + columns, mask=is_column, other=0.0).to(tl.float32)
        second = tl.where(is_value, second, second * factor * tl.where(is_query, for_queries, for_keys))
    angle_cos = tl.load(cos + token * HALF + columns, mask=is_column, other=0.0)
    angle_sin = tl.load(sin + token * HALF + columns, mask=is_column, other=0.0)
    rotated_first = tl.where(is_value, first, first * angle_cos - second * angle_sin)
    rotated_second = tl.where(is_value, second, second * angle_cos + first * angle_sin)

    target = query + (token * NUM_HEADS + head) * 2 * HALF + columns
    tl.store(target, rotated_first, mask=is_place & is_query)
    tl.store(target + HALF, rotated_second, mask=is_place & is_query)
    slot = tl.load(slots + token)
    _store_rows(
        key_cache, slot, head - NUM_HEADS, rotated_first, rotated_second, columns, is_key, NUM_KV_HEADS, HALF,
        WIDTH, BLOCK_SIZE, FORMAT, LARGEST, qkv.dtype.element_ty,
    )  # fmt: skip
    _store_rows(
        value_cache, slot, head - NUM_HEADS - NUM_KV_HEADS, rotated_first, rotated_second, columns,
        is_value & (head < ALL_HEADS), NUM_KV_HEADS, HALF, WIDTH, BLOCK_SIZE, FORMAT, LARGEST, qkv.dtype.element_ty,
    )  # fmt: skip


@triton.jit
def gated(gate_up, output, inner, GATE: tl.constexpr, BLOCK: tl.constexpr):
    """Computes `Ops.gated`: gate_up [T, 2 * inner] -> [T, inner]. Grid: (T, columns / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < inner
    gate = tl.load(gate_up + row * 2 * inner + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(output + row * inner + columns, apply_gate(gate, up, GATE), mask=is_column)


@triton.jit
def apply_gate(gate, up, GATE: tl.constexpr):
    """Applies one of the gates of `Ops.gated`, in float32."""
    argument = gate
    if GATE == "gelu_tanh":  # 0.5 * (1 + tanh(x)) is sigmoid(2 * x)
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    elif GATE == "swiglu_oai":  # with comparisons, because tl.minimum would drop a NaN
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
        argument = SLOPE * gate
    return gate * tl.sigmoid(argument) * up


@triton.jit
def store_kv(
    key, value, key_cache, value_cache, slots, key_stride, value_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Computes `Ops.store_kv`. key, value: rows of WIDTH numbers over all heads; slots: [T]. Grid: (T,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    columns = tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    tl.store(
        key_cache + slot * WIDTH + columns, tl.load(key + token * key_stride + columns, mask=is_column), mask=is_column
    )
    tl.store(
        value_cache + slot * WIDTH + columns,
        tl.load(value + token * value_stride + columns, mask=is_column),
        mask=is_column,
    )


@triton.jit(do_not_specialize=["num_rows"])
def linear_int8(
    x, weight, scales, bias, output, num_rows, outs, ins, x_stride, HAS_BIAS: tl.constexpr, OPERANDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiplies a few rows by a weight in int8, [outs, ins]. Reads the weight once per BLOCK_M rows.

    Grid: (outs / BLOCK_N, rows / BLOCK_M).
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_column, is_row = columns < outs, rows < num_rows
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, ins, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        is_input = inputs < ins
        part = tl.load(
            x + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :], mask=is_row[:, None] & is_input[None, :],
            other=0.0,
        )  # fmt: skip
        values = tl.load(
            weight + columns.to(tl.int64)[None, :] * ins + inputs[:, None],
            mask=is_column[None, :] & is_input[:, None], other=0,
        )  # fmt: skip
        total = tl.dot(part.to(OPERANDS), values.to(OPERANDS), total, input_precision="ieee")
    total *= tl.load(scales + columns, mask=is_column, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(
        output + rows.to(tl.int64)[:, None] * outs + columns[None, :], total, mask=is_row[:, None] & is_column[None, :]
    )


@triton.jit(do_not_specialize=["num_rows"])
def linear_int4(
    x, weight, scales, bias, output, num_rows, outs, ins, x_stride, HAS_BIAS: tl.constexpr, OPERANDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiplies a few rows by a weight in int4, in groups of GROUP as in `Ops.linear_int4`.

    A byte has two codes that are half a group apart. So each half of a group is a separate matrix multiplication.
    """
    HALF: tl.constexpr = GROUP // 2
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_column, is_row = columns < outs, rows < num_rows
    num_groups = ins // GROUP
    places = tl.arange(0, HALF)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in range(num_groups):
        source = x + rows.to(tl.int64)[:, None] * x_stride + group * GROUP + places[None, :]
        low = tl.load(source, mask=is_row[:, None], other=0.0)
        high = tl.load(source + HALF, mask=is_row[:, None], other=0.0)
        codes = tl.load(
            weight + (columns.to(tl.int64) * num_groups + group)[None, :] * HALF + places[:, None],
            mask=is_column[None, :], other=0,
        ).to(tl.int32)  # fmt: skip
        sums = tl.dot(low.to(OPERANDS), ((codes & 15) - 8).to(OPERANDS), input_precision="ieee")
        sums = tl.dot(high.to(OPERANDS), ((codes >> 4) - 8).to(OPERANDS), sums, input_precision="ieee")
        scale = tl.load(scales + columns.to(tl.int64) * num_groups + group, mask=is_column, other=0.0)
        total += sums * scale.to(tl.float32)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(
        output + rows.to(tl.int64)[:, None] * outs + columns[None, :], total, mask=is_row[:, None] & is_column[None, :]
    )


@triton.jit
def norm_round_to_fp8(
    x, residual, weight, output, scales, total, x_stride, eps, DIM: tl.constexpr, BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Computes `Ops.norm_round_to_fp8`, of one row: `rms_norm`, rounded as if it were stored, then `round_to_fp8`.

    Grid: (N,).
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < DIM
    values = tl.load(x + row * x_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row * DIM + columns, mask=is_column, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * DIM + columns, rounded, mask=is_column)
        values = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / DIM + eps)
    weights = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    normed = (values * factor * weights).to(x.dtype.element_ty).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(normed), 0) / LARGEST, SMALLEST)
    tl.store(scales + row, scale)
    tl.store(output + row * DIM + columns, (normed / scale).to(output.dtype.element_ty), mask=is_column)


@triton.jit
def _gated_part(gate_up, start, inner, GATE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns BLOCK numbers of `Ops.gated` of one row, rounded as if they were stored, in float32."""
    columns = start + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + columns, mask=columns < inner, other=0.0).to(tl.float32)
    up = tl.load(gate_up + inner + columns, mask=columns < inner, other=0.0).to(tl.float32)
    return apply_gate(gate, up, GATE).to(gate_up.dtype.element_ty).to(tl.float32)


@triton.jit
def gate_round_to_fp8(
    gate_up, output, scales, stride, inner, GATE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes `Ops.gate_round_to_fp8`, of one row. The gate is computed twice, which costs less than to store it.

    Columns after the end count as zeros: every gate makes zero of a gate of zero. Grid: (N,).
    """
    row = tl.program_id(0).to(tl.int64)
    peak = tl.zeros([BLOCK], tl.float32)
    for start in range(0, inner, BLOCK):
        peak = tl.maximum(peak, tl.abs(_gated_part(gate_up + row * stride, start, inner, GATE, BLOCK)))
    scale = tl.maximum(tl.max(peak, 0) / LARGEST, SMALLEST)
    tl.store(scales + row, scale)
    for start in range(0, inner, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = _gated_part(gate_up + row * stride, start, inner, GATE, BLOCK) / scale
        tl.store(output + row * inner + columns, values.to(output.dtype.element_ty), mask=columns < inner)


@triton.jit
def round_to_fp8(x, output, scales, x_stride, dim, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
    """Computes `Ops.round_to_fp8`, of one row. Grid: (N,)."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.zeros([BLOCK], tl.float32)
    for start in range(0, dim, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.abs(tl.load(x + row * x_stride + columns, mask=columns < dim, other=0.0)))
    scale = tl.maximum(tl.max(peak, 0) / LARGEST, SMALLEST)
    tl.store(scales + row, scale)
    for start in range(0, dim, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(x + row * x_stride + columns, mask=columns < dim, other=0.0).to(tl.float32) / scale
        tl.store(output + row * dim + columns, values.to(output.dtype.element_ty), mask=columns < dim)
