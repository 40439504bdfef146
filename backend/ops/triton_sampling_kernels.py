"""Sampling in Triton: one program draws the token of one row, however many filters it has.

A program reads its row in parts of BLOCK logits. The first pass finds the row's maximum, and the maximum of each place
of the parts. The last passes sum the weights of the kept tokens, exp((logit - maximum) / temperature), and find the
token at which the sum exceeds the random share of the total.

In between, the bound of the filters is found: the smallest logit that they keep. Usually few tokens matter. So a second
pass sums all weights and collects candidates: all logits above a threshold that some hundred places exceed. If the
filters' bound is certainly among the candidates, the rest happens among them, without reading the row again. Otherwise
the bound is searched in the whole row.

The search is a bisection between logits. Each of its steps counts and sums the weights above the middle, and moves one
end to the nearest logit, so the search ends as soon as one logit is left. A step accumulates by place in the part, and
adds the places up at its end only, because every sum over a whole part makes the threads wait for each other. A row's
result depends on that row alone. The kernel neither sorts nor waits for the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Weights of logits this many temperatures below the maximum are 0 in float32. No filter's bound needs to be lower.
NO_WEIGHT = tl.constexpr(110.0)
CANDIDATES = tl.constexpr(2048)  # at most, and a power of two
MIN_PLACES, MAX_PLACES = tl.constexpr(768), tl.constexpr(1536)  # that may exceed the candidates' threshold
THRESHOLD_STEPS = tl.constexpr(16)  # of the bisection that finds it


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
def _filter_bound(row, size, peak, rate, low, total, top_k, top_p, max_k, BLOCK: tl.constexpr):
    """Returns a bound that only the tokens reach that the filters keep, as `SamplingFilters` describes.

    `low` is the bound of min-p, and `total` the sum of the weights of all tokens from there on. A `top_k` of `max_k` is
    off.
    """
    bound = low
    if top_k < max_k:
        last, count, above = _search(row, size, peak, rate, bound, top_k, float("inf"), BLOCK)
        # Of tokens that are as likely as the last one, only those within the first `top_k` count.
        total = tl.minimum(above + (top_k - count).to(tl.float32) * tl.exp2((last - peak) * rate), total)
        bound = last
    if top_p < 1.0:
        bound, _, _ = _search(row, size, peak, rate, bound, max_k + 1, total * top_p, BLOCK)
    return bound


@triton.jit
def _threshold(peaks, peak, bound):
    """Returns a logit, at least `bound`, that between MIN_PLACES and MAX_PLACES of the places' maxima reach.

    Fewer reach it if fewer reach `bound`, and more if too many maxima are equal.
    """
    low, high = bound, bound
    if tl.sum((peaks >= bound).to(tl.int32), 0) > MAX_PLACES:
        high = peak
    for _ in range(THRESHOLD_STEPS):
        middle = low + (high - low) * 0.5
        is_enough = tl.sum((peaks >= middle).to(tl.int32), 0) >= MIN_PLACES
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
    return low


@triton.jit
def _collect(row, vocab_size, peak, rate, bound, threshold, values_out, tokens_out, BLOCK: tl.constexpr):
    """Writes the logits that are at least `threshold`, and their tokens, in the order of the vocabulary.

    Returns how many there are, of which at most CANDIDATES are written, the sum of their weights, and the sum of all
    weights, each of logits that are at least `bound`.
    """
    count = tl.zeros([], tl.int32)
    inside = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        values, weights = _weights(row, start, vocab_size, peak, rate, bound, BLOCK)
        is_candidate = values >= threshold
        sums += weights
        inside += tl.where(is_candidate, weights, 0.0)
        ones = is_candidate.to(tl.int32)
        places = count + tl.cumsum(ones, 0) - 1
        is_written = is_candidate & (places < CANDIDATES)
        tl.store(values_out + places, values, mask=is_written)
        tl.store(tokens_out + places, start + tl.arange(0, BLOCK), mask=is_written)
        count += tl.sum(ones, 0)
    return count, tl.sum(inside, 0), tl.sum(sums, 0)


@triton.jit
def _draw_from(values, bound, peak, rate, share, size, WIDTH: tl.constexpr):
    """Returns the place of the first of `size` logits at which the sum of the weights exceeds the share of the total.

    values: [WIDTH], of which those below `bound` do not count.
    """
    places = tl.arange(0, WIDTH)
    is_kept = (places < size) & (values >= bound)
    weights = tl.where(is_kept, tl.exp2((values - peak) * rate), 0.0).to(tl.float64)
    point = tl.sum(weights, 0) * share
    first = tl.min(tl.where((tl.cumsum(weights, 0) > point) & (weights > 0.0), places, WIDTH), 0)
    last = tl.max(tl.where(weights > 0.0, places, 0), 0)  # if rounding leaves none
    return tl.where(first < WIDTH, first, last)


@triton.jit
def _draw_from_row(row, vocab_size, peak, rate, bound, share, BLOCK: tl.constexpr):
    """Returns the token that is drawn from the whole row, of which logits below `bound` do not count."""
    point = _sum_from(row, vocab_size, peak, rate, bound, BLOCK) * share
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
    return begin + tl.where(first < BLOCK, first, last)


@triton.jit(do_not_specialize=["vocab_size"])
def draw_tokens(
    logits, rows, temperatures, shares, top_ks, top_ps, min_ps, values, tokens, chosen, vocab_size,
    HAS_FILTERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draws one token. logits: [N, vocab_size] float32, contiguous. All other tensors have R entries. Grid: (R,).

    values [R, CANDIDATES] float32 and tokens [R, CANDIDATES] int32 are memory for the candidates, if HAS_FILTERS.
    """
    place = tl.program_id(0)
    row = logits + tl.load(rows + place).to(tl.int64) * vocab_size
    rate = 1.4426950408889634 / tl.load(temperatures + place)  # log2(e): weights are powers of two
    share = tl.load(shares + place)

    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        peaks = tl.maximum(peaks, tl.load(row + places, mask=places < vocab_size, other=float("-inf")))
    peak = tl.max(peaks, 0)
    bound = peak - NO_WEIGHT / rate
    if HAS_FILTERS:
        top_k, top_p, min_p = tl.load(top_ks + place), tl.load(top_ps + place), tl.load(min_ps + place)
        if min_p > 0.0:
            bound = tl.maximum(bound, peak + tl.log2(min_p) / rate)
        threshold = _threshold(peaks, peak, bound)
        values += place * CANDIDATES
        tokens += place * CANDIDATES
        count, inside, total = _collect(row, vocab_size, peak, rate, bound, threshold, values, tokens, BLOCK)
        tl.debug_barrier()  # the candidates are read by other threads than wrote them
        # Whether the candidates contain all tokens that the filters keep.
        is_enough = threshold <= bound
        if top_k < vocab_size:
            is_enough = is_enough | (top_k <= count)
        elif top_p < 1.0:
            is_enough = is_enough | (inside >= total * top_p)
        if is_enough & (count <= CANDIDATES):
            bound = tl.maximum(bound, threshold)
            bound = _filter_bound(values, count, peak, rate, bound, total, top_k, top_p, vocab_size, CANDIDATES)
            candidates = tl.arange(0, CANDIDATES)
            kept = tl.load(values + candidates, mask=candidates < count, other=float("-inf"))
            drawn = _draw_from(kept, bound, peak, rate, share, count, CANDIDATES)
            token = tl.load(tokens + drawn)
        else:
            bound = _filter_bound(row, vocab_size, peak, rate, bound, total, top_k, top_p, vocab_size, BLOCK)
            token = _draw_from_row(row, vocab_size, peak, rate, bound, share, BLOCK)
    else:
        token = _draw_from_row(row, vocab_size, peak, rate, bound, share, BLOCK)
    # Rows with NaN have no certain result, but one within the vocabulary.
    tl.store(chosen + place, tl.maximum(tl.minimum(token, vocab_size - 1), 0).to(tl.int64))
