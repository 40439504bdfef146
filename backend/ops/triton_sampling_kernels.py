"""Sampling in Triton: one program draws the token of one row, however many filters it has.

A program reads its row several times, in parts of BLOCK logits. The first pass finds the row's maximum. The next ones
find the bound of the filters: the smallest logit that they keep. The last ones sum the weights of the kept tokens,
exp((logit - maximum) / temperature), and find the token at which the sum exceeds the random share of the total.

The bound is found by bisection between logits of the row. Each pass counts and sums the weights above the middle, and
moves one end to the nearest logit in the row, so the search ends as soon as one logit is left. Such a pass accumulates
by place in the part, and adds the places up at its end only, because every sum over a whole part makes the threads wait
for each other. A row's result depends on that row alone. The kernel neither sorts nor waits for the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Weights of logits this many temperatures below the maximum are 0 in float32. No filter's bound needs to be lower.
NO_WEIGHT = tl.constexpr(110.0)


@triton.jit
def _weights(row, start, vocab_size, peak, rate, bound, BLOCK: tl.constexpr):
    """Returns the logits from `start` on, and their weights: 0 below `bound`, and -inf and 0 behind the row's end."""
    places = start + tl.arange(0, BLOCK)
    values = tl.load(row + places, mask=places < vocab_size, other=float("-inf"))
    weights = tl.where(values >= bound, tl.exp2((values - peak) * rate), 0.0)
    return values, weights


@triton.jit
def _sum_from(row, vocab_size, peak, rate, bound, BLOCK: tl.constexpr):
    """Returns the sum of the weights of all logits that are at least `bound`."""
    total = tl.zeros([], tl.float64)
    for start in range(0, vocab_size, BLOCK):
        _, weights = _weights(row, start, vocab_size, peak, rate, bound, BLOCK)
        total += tl.sum(weights, 0).to(tl.float64)
    return total


@triton.jit
def _search(row, vocab_size, peak, rate, low, max_count, max_sum, BLOCK: tl.constexpr):
    """Returns the smallest logit with fewer than `max_count` logits above it, and less than `max_sum` of weight.

    `low` is a logit, or below all logits that may be the result. Also returns the number and the sum of the weights of
    the logits above the result.
    """
    high = peak
    count_above = tl.zeros([], tl.int32)
    sum_above = tl.zeros([], tl.float32)
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle < high, middle, low)
        counts = tl.zeros([BLOCK], tl.int32)
        sums = tl.zeros([BLOCK], tl.float32)
        nearest_above = tl.full([BLOCK], float("inf"), tl.float32)
        nearest_below = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            values, weights = _weights(row, start, vocab_size, peak, rate, float("-inf"), BLOCK)
            is_above = values > middle
            counts += is_above.to(tl.int32)
            sums += tl.where(is_above, weights, 0.0)
            nearest_above = tl.minimum(nearest_above, tl.where(is_above, values, float("inf")))
            nearest_below = tl.maximum(nearest_below, tl.where(is_above, float("-inf"), values))
        count, total = tl.sum(counts, 0), tl.sum(sums, 0)
        if (count < max_count) & (total < max_sum):
            high, count_above, sum_above = tl.maximum(low, tl.max(nearest_below, 0)), count, total
        else:
            low = tl.min(nearest_above, 0)
    return high, count_above, sum_above


@triton.jit
def _filter_bound(row, vocab_size, peak, rate, low, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """Returns a bound that only the tokens reach that the filters keep, as `SamplingFilters` describes."""
    bound = low
    if min_p > 0.0:
        bound = tl.maximum(low, peak + tl.log2(min_p) / rate)
    total = tl.zeros([], tl.float32)
    if (top_k < vocab_size) | (top_p < 1.0):
        total = _sum_from(row, vocab_size, peak, rate, bound, BLOCK).to(tl.float32)
    if top_k < vocab_size:
        last, count, above = _search(row, vocab_size, peak, rate, bound, top_k, float("inf"), BLOCK)
        # Of tokens that are as likely as the last one, only those within the first `top_k` count.
        total = tl.minimum(above + (top_k - count).to(tl.float32) * tl.exp2((last - peak) * rate), total)
        bound = last
    if top_p < 1.0:
        bound, _, _ = _search(row, vocab_size, peak, rate, bound, vocab_size + 1, total * top_p, BLOCK)
    return bound


@triton.jit(do_not_specialize=["vocab_size"])
def draw_tokens(
    logits, rows, temperatures, shares, top_ks, top_ps, min_ps, chosen, vocab_size, HAS_FILTERS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Draws one token. logits: [N, vocab_size] float32, contiguous. All other tensors have R entries. Grid: (R,)."""
    place = tl.program_id(0)
    row = logits + tl.load(rows + place).to(tl.int64) * vocab_size
    rate = 1.4426950408889634 / tl.load(temperatures + place)  # log2(e): weights are powers of two

    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        peaks = tl.maximum(peaks, tl.load(row + places, mask=places < vocab_size, other=float("-inf")))
    peak = tl.max(peaks, 0)
    bound = peak - NO_WEIGHT / rate
    if HAS_FILTERS:
        bound = _filter_bound(
            row, vocab_size, peak, rate, bound, tl.load(top_ks + place), tl.load(top_ps + place),
            tl.load(min_ps + place), BLOCK,
        )  # fmt: skip
    point = _sum_from(row, vocab_size, peak, rate, bound, BLOCK) * tl.load(shares + place)

    # The first part in which the sum exceeds the point, or the last one with a weight, if rounding leaves none.
    before = tl.zeros([], tl.float64)
    total = tl.zeros([], tl.float64)
    begin = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int32)
    while (start < vocab_size) & (total <= point):
        _, weights = _weights(row, start, vocab_size, peak, rate, bound, BLOCK)
        part = tl.sum(weights, 0).to(tl.float64)
        before = tl.where(part > 0.0, total, before)
        begin = tl.where(part > 0.0, start, begin)
        total += part
        start += BLOCK
    _, weights = _weights(row, begin, vocab_size, peak, rate, bound, BLOCK)
    sums = before + tl.cumsum(weights.to(tl.float64), 0)
    offsets = tl.arange(0, BLOCK)
    first = tl.min(tl.where((sums > point) & (weights > 0.0), offsets, BLOCK), 0)
    last = tl.max(tl.where(weights > 0.0, offsets, 0), 0)
    token = begin + tl.where(first < BLOCK, first, last)
    tl.store(chosen + place, tl.minimum(token, vocab_size - 1).to(tl.int64))
