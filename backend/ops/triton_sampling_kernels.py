"""Sampling in Triton: one program samples the token of one row, whatever the row asks for.

A program reads its row in parts of BLOCK logits. Penalties, biases and masks are applied to the logits as they are
read, so that the model's own logits remain for log-probabilities. The first pass finds the row's maximum, which is the
token of a greedy row, and the maximum of each place of the parts. The last passes sum the weights of the kept tokens,
exp((logit - maximum) / temperature), and find the token at which the sum exceeds the random share of the total.

In between, the bound of the filters is found: the smallest logit that they keep. Usually few tokens matter. So a second
pass sums all weights and collects candidates: all logits above a threshold that some hundred places exceed. If the
filters' bound is certainly among the candidates, the rest happens among them, without reading the row again. Otherwise
the bound is searched in the whole row.

The search is a bisection between logits. Each of its steps counts and sums the weights above the middle, and moves one
end to the nearest logit, so the search ends as soon as one logit is left. A step accumulates by place in the part, and
adds the places up at its end only, because every sum over a whole part makes the threads wait for each other. A row's
result depends on that row alone. The kernel neither sorts nor waits for the host.

A second kernel computes log-probabilities, in the rows that want them. It collects candidates in the same way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from backend.ops import sampling

# Weights of logits this many temperatures below the maximum are 0 in float32. No filter's bound needs to be lower.
NO_WEIGHT = tl.constexpr(110.0)
CANDIDATES = tl.constexpr(2048)  # at most, and a power of two
MIN_PLACES, MAX_PLACES = tl.constexpr(768), tl.constexpr(1536)  # that may exceed the candidates' threshold
THRESHOLD_STEPS = tl.constexpr(16)  # of the bisection that finds it
LOG2_E = tl.constexpr(1.4426950408889634)  # weights are powers of two
# As in sampling.py.
MARKED, COUNTS_INPUT, SCORED = (tl.constexpr(bit) for bit in (sampling.MARKED, sampling.COUNTS_INPUT, sampling.SCORED))
SEEN_BITS, MAX_SEEN = tl.constexpr(sampling.SEEN_BITS), tl.constexpr(sampling.MAX_SEEN)
NO_TOKEN = tl.constexpr(0x7FFFFFFF)  # behind every token


@triton.jit
def _logits(row, start, size, changes, CHANGES: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the logits from `start` on, with the row's changes if CHANGES, and -inf behind the row's end.

    The penalties round as `penalise` does: the kernel is compiled without fused multiplications and additions.
    """
    places = start + tl.arange(0, BLOCK)
    values = tl.load(row + places, mask=places < size, other=float("-inf"))
    if CHANGES:
        marks, num_marks, biases, mask, num_masked, presence, frequency, repetition = changes
        found = tl.load(marks + places, mask=places < num_marks, other=0)
        seen = found & MAX_SEEN
        counts = (seen - 1).to(tl.float32)
        penalised = tl.where(values > 0.0, tl.div_rn(values, repetition), values * repetition)
        penalised -= frequency * counts
        penalised -= tl.where(counts > 0.0, presence, 0.0)
        values = tl.where(seen > 0, penalised, values)
        indexes = found >> SEEN_BITS
        values += tl.load(biases + indexes, mask=indexes > 0, other=0.0)
        words = tl.load(mask + places // 32, mask=places < num_masked, other=-1)
        values = tl.where((words >> (places % 32)) & 1 != 0, values, float("-inf"))
    return values


@triton.jit
def _weights(row, start, vocab_size, peak, rate, bound, changes, CHANGES: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the logits from `start` on, and their weights: 0 below `bound`, and -inf and 0 behind the row's end."""
    values = _logits(row, start, vocab_size, changes, CHANGES, BLOCK)
    weights = tl.where(values >= bound, tl.exp2((values - peak) * rate), 0.0)
    return values, weights


@triton.jit
def _sum_from(row, vocab_size, peak, rate, bound, changes, CHANGES: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the sum of the weights of all logits that are at least `bound`."""
    total = tl.zeros([], tl.float64)
    for start in range(0, vocab_size, BLOCK):
        _, weights = _weights(row, start, vocab_size, peak, rate, bound, changes, CHANGES, BLOCK)
        total += tl.sum(weights, 0).to(tl.float64)
    return total


@triton.jit
def _search(row, vocab_size, peak, rate, low, max_count, max_sum, changes, CHANGES: tl.constexpr, BLOCK: tl.constexpr):
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
            values, weights = _weights(row, start, vocab_size, peak, rate, float("-inf"), changes, CHANGES, BLOCK)
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
def _filter_bound(
    row, size, peak, rate, low, total, top_k, top_p, max_k, changes, CHANGES: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns a bound that only the tokens reach that the filters keep, as `SamplingFilters` describes.

    `low` is the bound of min-p, and `total` the sum of the weights of all tokens from there on. A `top_k` of `max_k` is
    off.
    """
    bound = low
    if top_k < max_k:
        last, count, above = _search(row, size, peak, rate, bound, top_k, float("inf"), changes, CHANGES, BLOCK)
        # Of tokens that are as likely as the last one, only those within the first `top_k` count.
        total = tl.minimum(above + (top_k - count).to(tl.float32) * tl.exp2((last - peak) * rate), total)
        bound = last
    if top_p < 1.0:
        bound, _, _ = _search(row, size, peak, rate, bound, max_k + 1, total * top_p, changes, CHANGES, BLOCK)
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
def _collect(
    row, vocab_size, peak, rate, bound, threshold, values_out, tokens_out, changes,
    CHANGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the logits that are at least `threshold`, and their tokens, in the order of the vocabulary.

    Returns how many there are, of which at most CANDIDATES are written, the sum of their weights, and the sum of all
    weights, each of logits that are at least `bound`.
    """
    count = tl.zeros([], tl.int32)
    inside = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        values, weights = _weights(row, start, vocab_size, peak, rate, bound, changes, CHANGES, BLOCK)
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
def _draw_from_row(row, vocab_size, peak, rate, bound, share, changes, CHANGES: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the token that is drawn from the whole row, of which logits below `bound` do not count."""
    point = _sum_from(row, vocab_size, peak, rate, bound, changes, CHANGES, BLOCK) * share
    # The first part in which the sum exceeds the point, or the last one with a weight, if rounding leaves none.
    before = tl.zeros([], tl.float64)
    total = tl.zeros([], tl.float64)
    begin = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int32)
    while (start < vocab_size) & (total <= point):
        _, weights = _weights(row, start, vocab_size, peak, rate, bound, changes, CHANGES, BLOCK)
        part = tl.sum(weights, 0).to(tl.float64)
        before = tl.where(part > 0.0, total, before)
        begin = tl.where(part > 0.0, start, begin)
        total += part
        start += BLOCK
    _, weights = _weights(row, begin, vocab_size, peak, rate, bound, changes, CHANGES, BLOCK)
    sums = before + tl.cumsum(weights.to(tl.float64), 0)
    offsets = tl.arange(0, BLOCK)
    first = tl.min(tl.where((sums > point) & (weights > 0.0), offsets, BLOCK), 0)
    last = tl.max(tl.where(weights > 0.0, offsets, 0), 0)
    return begin + tl.where(first < BLOCK, first, last)


@triton.jit(do_not_specialize=["vocab_size", "num_words"])
def sample_rows(
    logits, rows, temperatures, shares, top_ks, top_ps, min_ps,
    input_ids, flags, marks, biases, mask_rows, masks, presences, frequencies, repetitions,
    values, tokens, chosen, vocab_size, num_words,
    HAS_ROWS: tl.constexpr, HAS_FILTERS: tl.constexpr, CHANGES: tl.constexpr, BIASES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Samples one token. logits: [N, vocab_size] float32, contiguous. Grid: one program for each token.

    With HAS_ROWS, `rows` are the logits' rows of the tokens, all of which are random. Otherwise, every row of the
    logits gives a token. The other parameters are those of `StepRows`: from `input_ids` to `repetitions` they are read
    if CHANGES, with BIASES biases for a row. values [., CANDIDATES] float32 and tokens [., CANDIDATES] int32 are memory
    for the candidates, if HAS_FILTERS.
    """
    place = tl.program_id(0)
    number = place
    if HAS_ROWS:
        number = tl.load(rows + place)
    row = logits + number.to(tl.int64) * vocab_size
    temperature, share = tl.load(temperatures + place), tl.load(shares + place)
    is_random = temperature > 0.0
    rate = LOG2_E / tl.where(is_random, temperature, 1.0)

    changes = (row,)
    if CHANGES:
        bits = tl.load(flags + place)
        marks += place.to(tl.int64) * vocab_size
        if bits & COUNTS_INPUT != 0:
            count = marks + tl.load(input_ids + place)
            mark = tl.load(count)
            tl.store(count, mark + tl.where(mark & MAX_SEEN == 0, 2, 1))
            tl.store(flags + place, bits & ~COUNTS_INPUT)
            tl.debug_barrier()  # the count is read by other threads than wrote it
        mask_row = tl.load(mask_rows + place)
        changes = (
            marks, tl.where(bits & MARKED != 0, vocab_size, 0), biases + place * BIASES,
            masks + tl.maximum(mask_row, 0) * num_words, tl.where(mask_row >= 0, vocab_size, 0),
            tl.load(presences + place), tl.load(frequencies + place), tl.load(repetitions + place),
        )  # fmt: skip

    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    starts = tl.zeros([BLOCK], tl.int32)  # of the parts in which the maxima stand first
    for start in range(0, vocab_size, BLOCK):
        found = _logits(row, start, vocab_size, changes, CHANGES, BLOCK)
        starts = tl.where(found > peaks, start, starts)
        peaks = tl.maximum(peaks, found)
    peak = tl.max(peaks, 0)
    bound = peak - NO_WEIGHT / rate
    token = tl.min(tl.where(peaks == peak, starts + tl.arange(0, BLOCK), NO_TOKEN), 0)  # of a greedy row
    is_unfiltered = is_random
    if HAS_FILTERS:
        top_k, top_p, min_p = tl.load(top_ks + place), tl.load(top_ps + place), tl.load(min_ps + place)
        is_unfiltered = is_random & (top_k >= vocab_size) & (top_p >= 1.0) & (min_p <= 0.0)
        if is_random & (is_unfiltered == 0):
            if min_p > 0.0:
                bound = tl.maximum(bound, peak + tl.log2(min_p) / rate)
            threshold = _threshold(peaks, peak, bound)
            values += place * CANDIDATES
            tokens += place * CANDIDATES
            count, inside, total = _collect(
                row, vocab_size, peak, rate, bound, threshold, values, tokens, changes, CHANGES, BLOCK
            )
            tl.debug_barrier()  # the candidates are read by other threads than wrote them
            # Whether the candidates contain all tokens that the filters keep.
            is_enough = threshold <= bound
            if top_k < vocab_size:
                is_enough = is_enough | (top_k <= count)
            elif top_p < 1.0:
                is_enough = is_enough | (inside >= total * top_p)
            if is_enough & (count <= CANDIDATES):
                bound = tl.maximum(bound, threshold)
                bound = _filter_bound(
                    values, count, peak, rate, bound, total, top_k, top_p, vocab_size, changes, False, CANDIDATES
                )
                candidates = tl.arange(0, CANDIDATES)
                kept = tl.load(values + candidates, mask=candidates < count, other=float("-inf"))
                drawn = _draw_from(kept, bound, peak, rate, share, count, CANDIDATES)
                token = tl.load(tokens + drawn)
            else:
                bound = _filter_bound(
                    row, vocab_size, peak, rate, bound, total, top_k, top_p, vocab_size, changes, CHANGES, BLOCK
                )
                token = _draw_from_row(row, vocab_size, peak, rate, bound, share, changes, CHANGES, BLOCK)
    if is_unfiltered:
        token = _draw_from_row(row, vocab_size, peak, rate, bound, share, changes, CHANGES, BLOCK)
    # Rows with NaN have no certain result, but one within the vocabulary.
    tl.store(chosen + place, tl.maximum(tl.minimum(token, vocab_size - 1), 0).to(tl.int64))


@triton.jit
def _next_likely(row, tokens, size, last, last_token, HAS_TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the most likely token after the given one, and its logit. Equal logits are in the order of their tokens.

    row: `size` logits, whose tokens are their places, or with HAS_TOKENS the numbers in `tokens`, which ascend.
    """
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    found = tl.full([BLOCK], NO_TOKEN, tl.int32)
    for start in range(0, size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        is_inside = places < size
        values = tl.load(row + places, mask=is_inside, other=float("-inf"))
        numbers = places
        if HAS_TOKENS:
            numbers = tl.load(tokens + places, mask=is_inside, other=NO_TOKEN)
        is_after = (values < last) | ((values == last) & (numbers > last_token))
        is_better = is_inside & is_after & ((values > best) | (found == NO_TOKEN))
        best = tl.where(is_better, values, best)
        found = tl.where(is_better, numbers, found)
    value = tl.max(best, 0)
    return value, tl.min(tl.where(best == value, found, NO_TOKEN), 0)


@triton.jit
def _count_above(row, size, value, BLOCK: tl.constexpr):
    """Returns how many of `size` logits are larger than `value`."""
    counts = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        counts += (tl.load(row + places, mask=places < size, other=float("-inf")) > value).to(tl.int64)
    return tl.sum(counts, 0)


@triton.jit(do_not_specialize=["vocab_size", "num_top"])
def score_rows(
    logits, flags, chosen, values, tokens, own, ranks, top_ids, top, vocab_size, num_top, BLOCK: tl.constexpr
):
    """Computes the log-probabilities of one row with SCORED. Grid: one program for each row.

    logits: [N, vocab_size] float32, contiguous. values, tokens: as those of `sample_rows`. own, ranks: [N], and top_ids
    and top: [N, num_top], as in `LogprobTensors`.
    """
    place = tl.program_id(0)
    if tl.load(flags + place) & SCORED != 0:
        row = logits + place.to(tl.int64) * vocab_size
        value = tl.load(row + tl.load(chosen + place))
        peaks = tl.full([BLOCK], float("-inf"), tl.float32)
        broken = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab_size, BLOCK):
            found = _logits(row, start, vocab_size, (row,), False, BLOCK)
            peaks = tl.maximum(peaks, found)
            broken |= (found != found).to(tl.int32)
        peak = tl.where(tl.max(broken, 0) > 0, float("nan"), tl.max(peaks, 0))
        threshold = _threshold(peaks, peak, peak - NO_WEIGHT)
        values += place * CANDIDATES
        tokens += place * CANDIDATES
        count, _, total = _collect(
            row, vocab_size, peak, LOG2_E, float("-inf"), threshold, values, tokens, (row,), False, BLOCK
        )
        tl.debug_barrier()  # the candidates are read by other threads than wrote them
        logarithm = tl.log(total)
        has_all = count <= CANDIDATES
        if has_all & (value >= threshold):
            rank = 1 + _count_above(values, count, value, CANDIDATES)
        else:
            rank = 1 + _count_above(row, vocab_size, value, BLOCK)
        tl.store(own + place, value - peak - logarithm)
        tl.store(ranks + place, rank)
        likely = tl.full([], float("inf"), tl.float32)
        token = tl.full([], -1, tl.int32)
        for i in range(num_top):
            if has_all & (count >= num_top):
                likely, token = _next_likely(values, tokens, count, likely, token, True, CANDIDATES)
            else:
                likely, token = _next_likely(row, tokens, vocab_size, likely, token, False, BLOCK)
            # Only rows with NaN have too few tokens in an order.
            tl.store(top_ids + place * num_top + i, tl.minimum(token, vocab_size - 1).to(tl.int64))
            tl.store(top + place * num_top + i, likely - peak - logarithm)
