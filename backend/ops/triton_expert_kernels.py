"""Triton kernels for a mixture of experts. They need no host sync, so a CUDA graph can capture a step.

    route               the router's scores -> each token's top-k experts and their weights
    count_assignments   how many tokens chose each expert
    group_assignments   sorts assignments into blocks of BLOCK_M of one expert each
    expert_product      a linear layer over such blocks: one program for each block and each BLOCK_N outputs
    combine             each token's weighted sum over its experts

An assignment is one (token, chosen expert) pair. The assignment of a token to its k-th expert has the number
`token * K + k`, out of T * K. The size of all memory follows from the number of tokens in the step, so the host need
not know which experts are chosen. A row's sums are computed in the same order at every position in a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from backend.ops.triton_kernels import apply_gate

LEAST = tl.constexpr(-3.4028234663852886e38)  # the least finite float32


@triton.jit
def route(
    scores, weights, chosen, row_stride, NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, NORMALISE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Selects the top-k experts of each token and computes their weights, [T, NUM_CHOSEN] each.

    scores: rows of NUM_EXPERTS numbers, `row_stride` apart. If scores are equal, the first expert is selected. A
    NaN ranks last, but makes all weights of its row NaN. Grid: (T,).
    """
    row = tl.program_id(0).to(tl.int64)
    experts, places = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    is_expert = experts < NUM_EXPERTS
    values = tl.load(scores + row * row_stride + experts, mask=is_expert, other=float("-inf")).to(tl.float32)
    most = tl.max(tl.where(values == values, values, float("-inf")), 0)
    total = tl.sum(tl.where(is_expert, tl.exp(values - most), 0.0), 0)
    # Experts that can still be selected score at least LEAST. Selected experts score -inf, so none is selected twice.
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
    tl.store(weights + row * NUM_CHOSEN + places, taken, mask=is_place)
    tl.store(chosen + row * NUM_CHOSEN + places, numbers.to(tl.int64), mask=is_place)


@triton.jit(do_not_specialize=["num_assignments"])
def count_assignments(chosen, counts, num_assignments, BLOCK: tl.constexpr):
    """Counts the assignments of each expert. chosen: [T * K]. Grid: (experts,)."""
    expert = tl.program_id(0)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_assignments, BLOCK):
        assignments = start + tl.arange(0, BLOCK)
        found += (tl.load(chosen + assignments, mask=assignments < num_assignments, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_assignments"])
def group_assignments(
    chosen, counts, block_assignments, block_experts, num_assignments, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes each block's expert and its assignments in ascending order. Unused blocks and padding get -1.

    Grid: (blocks,), the maximum number of blocks that can be needed.
    """
    block = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    sizes = tl.load(counts + experts, mask=experts < NUM_EXPERTS, other=0)
    blocks = (sizes + BLOCK_M - 1) // BLOCK_M
    expert = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0)
    tl.store(block_experts + block, tl.where(expert < NUM_EXPERTS, expert, -1))
    if expert < NUM_EXPERTS:
        # The rank of this block's first assignment among the assignments of its expert.
        first = (block - tl.sum(tl.where(experts < expert, blocks, 0), 0)) * BLOCK_M
        places = tl.arange(0, BLOCK_M)
        is_empty = first + places >= tl.sum(tl.where(experts == expert, sizes, 0), 0)
        tl.store(block_assignments + block * BLOCK_M + places, -1, mask=is_empty)
        before = 0
        for start in range(0, num_assignments, BLOCK):
            assignments = start + tl.arange(0, BLOCK)
            is_ours = (tl.load(chosen + assignments, mask=assignments < num_assignments, other=-1) == expert).to(
                tl.int32
            )
            ranks = before + tl.cumsum(is_ours, 0) - 1 - first
            is_here = (is_ours == 1) & (ranks >= 0) & (ranks < BLOCK_M)
            tl.store(block_assignments + block * BLOCK_M + ranks, assignments, mask=is_here)
            before += tl.sum(is_ours, 0)


@triton.jit
def expert_product(
    x, weight, scales, bias, output, block_assignments, block_experts, outs, ins, x_stride, ASSIGNMENTS: tl.constexpr,
    FORMAT: tl.constexpr, GATE: tl.constexpr, HAS_BIAS: tl.constexpr, OPERANDS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiplies rows by the weights of their experts, [experts, outs, ins] in a format of `Ops`.

    A row of x is the input of ASSIGNMENTS consecutive assignments. With a gate, a program's columns alternate between
    the gate and the output that it multiplies. Output: [T * K, outs], with a gate [T * K, outs / 2].
    Grid: (blocks, outs / BLOCK_N).
    """
    expert = tl.load(block_experts + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        assignments = tl.load(block_assignments + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))
        is_row = assignments >= 0
        rows = x + (assignments // ASSIGNMENTS).to(tl.int64) * x_stride
        places = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = places < outs
        columns = places if GATE is None else places % 2 * (outs // 2) + places // 2
        columns += expert * outs  # columns are numbered over all experts
        if FORMAT == "int4":
            total = _sums_int4(
                rows, is_row, weight, scales, columns, is_column, ins, OPERANDS, BLOCK_M, BLOCK_N, BLOCK_K
            )
        else:
            total = _sums(rows, is_row, weight, columns, is_column, ins, FORMAT, OPERANDS, BLOCK_M, BLOCK_N, BLOCK_K)
        if FORMAT == "int8" or FORMAT == "fp8":
            total *= tl.load(scales + columns, mask=is_column, other=0.0)[None, :]
        if HAS_BIAS:
            total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        assignments = assignments.to(tl.int64)[:, None]
        if GATE is None:
            tl.store(output + assignments * outs + places[None, :], total, mask=is_row[:, None] & is_column[None, :])
        else:
            gate, up = tl.split(tl.reshape(total, [BLOCK_M, BLOCK_N // 2, 2]))
            half = outs // 2
            places = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            tl.store(
                output + assignments * half + places[None, :], apply_gate(gate, up, GATE),
                mask=is_row[:, None] & (places < half)[None, :],
            )  # fmt: skip


@triton.jit
def _sums(
    rows, is_row, weight, columns, is_column, ins, FORMAT: tl.constexpr, OPERANDS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes the sums of a matrix multiplication with unquantised, int8 or fp8 weights, before scales."""
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, ins, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        is_input = inputs < ins
        part = tl.load(rows[:, None] + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        values = tl.load(
            weight + columns[None, :] * ins + inputs[:, None], mask=is_column[None, :] & is_input[:, None], other=0
        )
        if FORMAT == "fp8":
            values = values.to(tl.float8e4nv, bitcast=True)
        total = tl.dot(part.to(OPERANDS), values.to(OPERANDS), total, input_precision="ieee")
    return total


@triton.jit
def _sums_int4(
    rows, is_row, weight, scales, columns, is_column, ins, OPERANDS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Computes the sums of a matrix multiplication with int4 weights, as `linear_int4` of triton_kernels.py does."""
    HALF: tl.constexpr = GROUP // 2
    num_groups = ins // GROUP
    places = tl.arange(0, HALF)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in range(num_groups):
        source = rows[:, None] + group * GROUP + places[None, :]
        low = tl.load(source, mask=is_row[:, None], other=0.0)
        high = tl.load(source + HALF, mask=is_row[:, None], other=0.0)
        codes = tl.load(
            weight + (columns * num_groups + group)[None, :] * HALF + places[:, None], mask=is_column[None, :], other=0
        ).to(tl.int32)
        sums = tl.dot(low.to(OPERANDS), ((codes & 15) - 8).to(OPERANDS), input_precision="ieee")
        sums = tl.dot(high.to(OPERANDS), ((codes >> 4) - 8).to(OPERANDS), sums, input_precision="ieee")
        scale = tl.load(scales + columns * num_groups + group, mask=is_column, other=0.0)
        total += sums * scale.to(tl.float32)[None, :]
    return total


@triton.jit
def combine(
    results, weights, chosen, output, size, NUM_CHOSEN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Multiplies each token's results, [T * K, size], by their weights and adds them in the order of the experts.

    Grid: (T, size / BLOCK).
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    places = tl.arange(0, BLOCK_K)
    is_left = places < NUM_CHOSEN
    experts = tl.load(chosen + token * NUM_CHOSEN + places, mask=is_left, other=0)
    token_weights = tl.load(weights + token * NUM_CHOSEN + places, mask=is_left, other=0.0)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(NUM_CHOSEN):
        place = tl.argmin(tl.where(is_left, experts, 1 << 30), 0)
        weight = tl.sum(tl.where(places == place, token_weights, 0.0), 0)
        result = tl.load(results + (token * NUM_CHOSEN + place) * size + columns, mask=is_column, other=0.0)
        total += weight * result
        is_left = is_left & (places != place)
    tl.store(output + token * size + columns, total, mask=is_column)
