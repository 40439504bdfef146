"""A mixture of experts, in Triton: who visits whom is found out on the device, in memory whose size follows from the
step's alone, so that no host is asked and a step can be captured.

A visit is one token's to one expert: number `token * K + place` of T * K. The visits to an expert are cut into blocks
of BLOCK_M, each of which meets a part of its weight in one program. A row's sums are in one order wherever it stands.
"""

from __future__ import annotations

import triton
import triton.language as tl

from backend.ops.triton_kernels import through

LEAST = tl.constexpr(-3.4028234663852886e38)  # of float32 that is finite


@triton.jit
def route(
    scores, shares, chosen, row_stride, NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, NORMALISE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """scores: rows of NUM_EXPERTS, so far apart -> [T, NUM_CHOSEN] each. Of equal scores the first is taken. One that
    is no number comes last, but makes all shares such. Grid: (T,)."""
    row = tl.program_id(0).to(tl.int64)
    experts, places = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    is_expert = experts < NUM_EXPERTS
    values = tl.load(scores + row * row_stride + experts, mask=is_expert, other=float("-inf")).to(tl.float32)
    most = tl.max(tl.where(values == values, values, float("-inf")), 0)
    total = tl.sum(tl.where(is_expert, tl.exp(values - most), 0.0), 0)
    # Whoever is left stands above those who are not, so that nobody is taken twice.
    left = tl.where(is_expert, tl.where(values > LEAST, values, LEAST), float("-inf"))
    numbers = tl.zeros([BLOCK_K], tl.int32)
    for place in range(NUM_CHOSEN):
        number = tl.argmax(left, 0)
        numbers = tl.where(places == place, number, numbers)
        left = tl.where(experts == number, float("-inf"), left)
    is_place = places < NUM_CHOSEN
    taken = tl.load(scores + row * row_stride + numbers, mask=is_place, other=0.0).to(tl.float32)
    taken = tl.where(is_place, tl.exp(taken - most) / total, 0.0)
    if NORMALISE:
        taken /= tl.sum(taken, 0)
    tl.store(shares + row * NUM_CHOSEN + places, taken, mask=is_place)
    tl.store(chosen + row * NUM_CHOSEN + places, numbers.to(tl.int64), mask=is_place)


@triton.jit(do_not_specialize=["num_visits"])
def count_visits(chosen, counts, num_visits, BLOCK: tl.constexpr):
    """To each expert. chosen: [T * K]. Grid: (experts,)."""
    expert = tl.program_id(0)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_visits, BLOCK):
        visits = start + tl.arange(0, BLOCK)
        found += (tl.load(chosen + visits, mask=visits < num_visits, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_visits"])
def group_visits(
    chosen, counts, visits_of_blocks, experts_of_blocks, num_visits, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each block's expert, and its visits in the order of their numbers; -1 for what has none. Grid: (blocks,), as many
    as there may be."""
    block = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    visitors = tl.load(counts + experts, mask=experts < NUM_EXPERTS, other=0)
    blocks = (visitors + BLOCK_M - 1) // BLOCK_M
    expert = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0)
    tl.store(experts_of_blocks + block, tl.where(expert < NUM_EXPERTS, expert, -1))
    if expert < NUM_EXPERTS:
        # The first visit of this block, among those of its expert.
        first = (block - tl.sum(tl.where(experts < expert, blocks, 0), 0)) * BLOCK_M
        places = tl.arange(0, BLOCK_M)
        is_empty = first + places >= tl.sum(tl.where(experts == expert, visitors, 0), 0)
        tl.store(visits_of_blocks + block * BLOCK_M + places, -1, mask=is_empty)
        before = 0
        for start in range(0, num_visits, BLOCK):
            visits = start + tl.arange(0, BLOCK)
            is_ours = (tl.load(chosen + visits, mask=visits < num_visits, other=-1) == expert).to(tl.int32)
            ranks = before + tl.cumsum(is_ours, 0) - 1 - first
            is_here = (is_ours == 1) & (ranks >= 0) & (ranks < BLOCK_M)
            tl.store(visits_of_blocks + block * BLOCK_M + ranks, visits, mask=is_here)
            before += tl.sum(is_ours, 0)


@triton.jit
def visit(
    x, weight, scales, bias, output, visits_of_blocks, experts_of_blocks, outs, ins, x_stride, VISITS: tl.constexpr,
    FORM: tl.constexpr, GATE: tl.constexpr, HAS_BIAS: tl.constexpr, OPERANDS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows with their experts' weights: [experts, outs, ins], in a form of `Ops`. A row of x is that of VISITS visits,
    one after the other. With a gate, a program takes its outs from the gate and from what that is multiplied with, in
    turns. Output: [T * K, outs], or half of them. Grid: (blocks, outs / BLOCK_N)."""
    expert = tl.load(experts_of_blocks + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        visits = tl.load(visits_of_blocks + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))
        is_row = visits >= 0
        rows = x + (visits // VISITS).to(tl.int64) * x_stride
        places = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = places < outs
        columns = places if GATE is None else places % 2 * (outs // 2) + places // 2
        columns += expert * outs  # over all experts
        if FORM == "int4":
            total = _sums_int4(
                rows, is_row, weight, scales, columns, is_column, ins, OPERANDS, BLOCK_M, BLOCK_N, BLOCK_K
            )
        else:
            total = _sums(rows, is_row, weight, columns, is_column, ins, FORM, OPERANDS, BLOCK_M, BLOCK_N, BLOCK_K)
        if FORM == "int8" or FORM == "fp8":
            total *= tl.load(scales + columns, mask=is_column, other=0.0)[None, :]
        if HAS_BIAS:
            total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        visits = visits.to(tl.int64)[:, None]
        if GATE is None:
            tl.store(output + visits * outs + places[None, :], total, mask=is_row[:, None] & is_column[None, :])
        else:
            gate, up = tl.split(tl.reshape(total, [BLOCK_M, BLOCK_N // 2, 2]))
            half = outs // 2
            places = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            tl.store(
                output + visits * half + places[None, :], through(gate, up, GATE),
                mask=is_row[:, None] & (places < half)[None, :],
            )  # fmt: skip


@triton.jit
def _sums(
    rows, is_row, weight, columns, is_column, ins, FORM: tl.constexpr, OPERANDS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, ins, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        is_input = inputs < ins
        part = tl.load(rows[:, None] + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        numbers = tl.load(
            weight + columns[None, :] * ins + inputs[:, None], mask=is_column[None, :] & is_input[:, None], other=0
        )
        if FORM == "fp8":
            numbers = numbers.to(tl.float8e4nv, bitcast=True)
        total = tl.dot(part.to(OPERANDS), numbers.to(OPERANDS), total, input_precision="ieee")
    return total


@triton.jit
def _sums_int4(
    rows, is_row, weight, scales, columns, is_column, ins, OPERANDS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """As `linear_int4` in triton_kernels.py has them."""
    HALF: tl.constexpr = GROUP // 2
    num_groups = ins // GROUP
    places = tl.arange(0, HALF)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in range(num_groups):
        source = rows[:, None] + group * GROUP + places[None, :]
        low = tl.load(source, mask=is_row[:, None], other=0.0)
        high = tl.load(source + HALF, mask=is_row[:, None], other=0.0)
        numbers = tl.load(
            weight + (columns * num_groups + group)[None, :] * HALF + places[:, None], mask=is_column[None, :], other=0
        ).to(tl.int32)
        sums = tl.dot(low.to(OPERANDS), ((numbers & 15) - 8).to(OPERANDS), input_precision="ieee")
        sums = tl.dot(high.to(OPERANDS), ((numbers >> 4) - 8).to(OPERANDS), sums, input_precision="ieee")
        scale = tl.load(scales + columns * num_groups + group, mask=is_column, other=0.0)
        total += sums * scale.to(tl.float32)[None, :]
    return total


@triton.jit
def combine(
    results, shares, chosen, output, size, NUM_CHOSEN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Each token's results, [T * K, size], times their shares, summed in the order of the experts' numbers. Grid: (T,
    size / BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    places = tl.arange(0, BLOCK_K)
    is_left = places < NUM_CHOSEN
    experts = tl.load(chosen + token * NUM_CHOSEN + places, mask=is_left, other=0)
    portions = tl.load(shares + token * NUM_CHOSEN + places, mask=is_left, other=0.0)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(NUM_CHOSEN):
        place = tl.argmin(tl.where(is_left, experts, 1 << 30), 0)
        share = tl.sum(tl.where(places == place, portions, 0.0), 0)
        result = tl.load(results + (token * NUM_CHOSEN + place) * size + columns, mask=is_column, other=0.0)
        total += share * result
        is_left = is_left & (places != place)
    tl.store(output + token * size + columns, total, mask=is_column)
