"""Paged attention in Triton: four kernels that read keys and values through the block tables.

    attend_chunks    prompts and chunks of prompts: one program per tile of query tokens, or several for splits of keys
    join_chunks      joins the splits of attend_chunks
    attend_decodes   decodes: several programs per sequence, one for each split of its keys (flash-decoding)
    join_splits      joins the results of attend_decodes

A program reads a key/value head once for all query heads that share it. Those query heads are the rows of one tile,
[BLOCK_M, D]. A prompt's tile contains several tokens, each with all of these heads. Keys and values are read in tiles
of TILE tokens. The softmax is computed online from a running maximum (`peak`) and a running sum (`total`), as in
Milakov and Gimelshein, arXiv 1805.02867.

The splits of a decode depend only on the length of its sequence. The number of programs depends on the batch, but it
decides only which program computes which splits. So a row is summed in the same order in every batch.

Scores are multiplied by log2(e), because the kernels compute exponentials as powers of two. OPERANDS is the dtype of
the inputs of matrix multiplications. WAITS: the kernel starts early and waits for the results of the previous one, as
in backend/ops/triton_row_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)
PLAIN = tl.constexpr(0)  # formats of the cache, as in backend.kv_cache
INT8 = tl.constexpr(1)
FP8 = tl.constexpr(2)


@triton.jit
def _load_rows(
    cache, rows, scale_places, is_row, dims, is_dim, FORMAT: tl.constexpr, OPERANDS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Loads rows of a cache in the dtype OPERANDS. `rows` and `scale_places` are the offsets of the rows and scales.

    The shapes of the arguments broadcast: [N, 1] and [1, D], or [1, N] and [D, 1]. IS_WHOLE: nothing is masked.
    """
    if IS_WHOLE:
        values = tl.load(cache + rows + dims)
    else:
        values = tl.load(cache + rows + dims, mask=is_row & is_dim, other=0.0 if FORMAT == PLAIN else 0)
    if FORMAT != PLAIN:
        scales = tl.load((cache + scale_places).to(tl.pointer_type(tl.float32)), mask=is_row, other=0.0)
        if FORMAT == FP8:
            values = values.to(tl.float8e4nv, bitcast=True)
        values = values.to(tl.float32) * scales
    return values.to(OPERANDS)


@triton.jit
def _absorb(
    peak, total, result, query, position, start, seq_len, head, table, key_cache, value_cache, scale,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FORMAT: tl.constexpr,
    OPERANDS: tl.constexpr, IS_SEEN: tl.constexpr,
):  # fmt: skip
    """Adds TILE tokens, beginning at `start`, to the online softmax of the query rows at `position`.

    IS_SEEN: every row sees every one of these tokens, so nothing has to be masked.
    """
    IS_WHOLE: tl.constexpr = IS_SEEN and HEAD_DIM == BLOCK_D
    tokens = start + tl.arange(0, TILE)
    dims = tl.arange(0, BLOCK_D)
    is_token, is_dim = tokens < seq_len, dims < HEAD_DIM
    if IS_SEEN:
        blocks = tl.load(table + tokens // BLOCK_SIZE).to(tl.int64)
    else:
        blocks = tl.load(table + tokens // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
    # A block has the numbers of all its tokens, and then their scales, if any, head by head.
    begins = blocks * (BLOCK_SIZE * NUM_KV_HEADS * WIDTH)
    rows = begins + (tokens % BLOCK_SIZE * NUM_KV_HEADS + head) * HEAD_DIM
    scales = begins + BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM + (head * BLOCK_SIZE + tokens % BLOCK_SIZE) * 4

    keys = _load_rows(
        key_cache, rows[None, :], scales[None, :], is_token[None, :], dims[:, None], is_dim[:, None], FORMAT, OPERANDS,
        IS_WHOLE,
    )  # fmt: skip  # [D, TILE]
    scores = tl.dot(query, keys, input_precision="ieee")  # [BLOCK_M, TILE]
    if SOFTCAP > 0.0:
        capped = 2.0 * tl.sigmoid(2.0 * scale / SOFTCAP * scores) - 1.0  # tanh
        scores = capped * (SOFTCAP * LOG2E)
    else:
        scores = scores * (scale * LOG2E)
    if not IS_SEEN:
        is_seen = tokens[None, :] <= position[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (tokens[None, :] > position[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))

    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = new_peak
    if not IS_SEEN:
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # 0 for rows without a visible token so far
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(peak - base)
    values = _load_rows(
        value_cache, rows[:, None], scales[:, None], is_token[:, None], dims[None, :], is_dim[None, :], FORMAT,
        OPERANDS, IS_WHOLE,
    )  # fmt: skip  # [TILE, D]
    result = tl.dot(weights.to(OPERANDS), values, result * decay[:, None], input_precision="ieee")
    return new_peak, total * decay + tl.sum(weights, 1), result


@triton.jit(do_not_specialize=["table_width"])  # table_width differs from step to step
def attend_chunks(
    query, key_cache, value_cache, output, results, peaks, totals, tiles, starts, seq_lens, tables, sinks, table_width,
    scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, FORMAT: tl.constexpr,
    OPERANDS: tl.constexpr, HAS_SPLITS: tl.constexpr,
):  # fmt: skip
    """Computes the attention of prompts. One program computes BLOCK_Q tokens of a sequence for one key/value head.

    tiles: [num_tiles, 2], where a row is a sequence, or -1 for no tile, and its first token. With HAS_SPLITS, a
    program reads only one of several splits of the keys, and `join_chunks` joins them in float32: `results` [num_tiles,
    NUM_KV_HEADS, splits, BLOCK_M, BLOCK_D], `peaks` and `totals` [num_tiles, NUM_KV_HEADS, splits, BLOCK_M].
    Grid: (num_tiles, NUM_KV_HEADS, splits).
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    sequence = tl.load(tiles + 2 * tl.program_id(0))
    if sequence < 0:
        return
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    kv_head = tl.program_id(1)
    begin = tl.load(starts + sequence)
    query_len = tl.load(starts + sequence + 1) - begin
    seq_len = tl.load(seq_lens + sequence)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    token = first + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (token < query_len)
    position = seq_len - query_len + token
    places = (((begin + token).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM)[:, None] + dims[None, :]
    is_place = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(query + places, mask=is_place, other=0.0).to(OPERANDS)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:  # noqa: SIM102  # a constant and a value
        if tl.program_id(2) == 0:
            peak = tl.load(sinks + head, mask=is_row, other=0.0) * LOG2E
            total += 1.0
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(0, seq_len - query_len + first - WINDOW + 1) // TILE * TILE
    high = tl.minimum(seq_len, seq_len - query_len + first + BLOCK_Q)
    # All rows see the tokens before the tile's first one. With a window, the last rows may not.
    seen = low if WINDOW > 0 else (seq_len - query_len + first + 1) // TILE * TILE
    num_splits = tl.num_programs(2)
    if HAS_SPLITS:
        span = ((high - low + TILE - 1) // TILE + num_splits - 1) // num_splits * TILE
        low += tl.program_id(2) * span
        high = tl.minimum(low + span, high)
        seen = tl.minimum(seen, high)
    for start in range(low, seen, TILE):
        peak, total, result = _absorb(
            peak, total, result, queries, position, start, seq_len, kv_head, tables + sequence * table_width,
            key_cache, value_cache, scale, NUM_KV_HEADS, HEAD_DIM, WIDTH, BLOCK_SIZE, BLOCK_D, TILE, WINDOW, SOFTCAP,
            FORMAT, OPERANDS, True,
        )  # fmt: skip
    for start in range(tl.maximum(low, seen), high, TILE):
        peak, total, result = _absorb(
            peak, total, result, queries, position, start, seq_len, kv_head, tables + sequence * table_width,
            key_cache, value_cache, scale, NUM_KV_HEADS, HEAD_DIM, WIDTH, BLOCK_SIZE, BLOCK_D, TILE, WINDOW, SOFTCAP,
            FORMAT, OPERANDS, False,
        )  # fmt: skip
    if HAS_SPLITS:
        parts = ((tl.program_id(0) * NUM_KV_HEADS + kv_head) * num_splits + tl.program_id(2)) * BLOCK_M + rows
        tl.store(peaks + parts, peak)
        tl.store(totals + parts, total)
        tl.store(results + parts.to(tl.int64)[:, None] * BLOCK_D + dims[None, :], result)
    else:
        total = tl.where(is_row, total, 1.0)
        tl.store(output + places, result / total[:, None], mask=is_place)


@triton.jit(do_not_specialize=["num_splits"])
def join_chunks(
    output, results, peaks, totals, tiles, starts, num_splits,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """Joins the splits of `attend_chunks`, JOINED at a time. Grid: (num_tiles, NUM_KV_HEADS)."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    sequence = tl.load(tiles + 2 * tl.program_id(0))
    if sequence < 0:
        return
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    kv_head = tl.program_id(1)
    begin = tl.load(starts + sequence)
    query_len = tl.load(starts + sequence + 1) - begin
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    token = first + rows // GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (token < query_len)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first_split in range(0, num_splits, JOINED):
        for i in tl.static_range(JOINED):  # their loads do not wait for each other
            split = first_split + i
            is_part = (rows >= 0) & (split < num_splits)
            parts = ((tl.program_id(0) * NUM_KV_HEADS + kv_head) * num_splits + split) * BLOCK_M + rows
            height = tl.load(peaks + parts, mask=is_part, other=float("-inf"))
            new_peak = tl.maximum(peak, height)
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            decay, weight = tl.exp2(peak - base), tl.exp2(height - base)
            source = results + parts.to(tl.int64)[:, None] * BLOCK_D + dims[None, :]
            partial = tl.load(source, mask=is_part[:, None], other=0.0)
            result = result * decay[:, None] + partial * weight[:, None]
            total = total * decay + tl.load(totals + parts, mask=is_part, other=0.0) * weight
            peak = new_peak
    total = tl.where(is_row, total, 1.0)
    head = kv_head * GROUP + rows % GROUP
    places = (((begin + token).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(output + places, result / total[:, None], mask=is_row[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit
def _splits(seq_len, TILE: tl.constexpr, WINDOW: tl.constexpr, MIN_TILES: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Returns, for one decode, the first tile that it reads, the number of tiles per split and the number of splits."""
    first_tile = 0
    if WINDOW > 0:
        first_tile = tl.maximum(0, seq_len - WINDOW) // TILE
    num_tiles = (seq_len + TILE - 1) // TILE - first_tile
    split_tiles = tl.maximum(MIN_TILES, (num_tiles + MAX_SPLITS - 1) // MAX_SPLITS)
    return first_tile, split_tiles, (num_tiles + split_tiles - 1) // split_tiles


@triton.jit(do_not_specialize=["table_width"])  # table_width differs from step to step
def attend_decodes(
    query, key_cache, value_cache, results, peaks, totals, sequences, starts, seq_lens, tables, table_width, scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FORMAT: tl.constexpr, OPERANDS: tl.constexpr,
    MIN_TILES: tl.constexpr, MAX_SPLITS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Computes the attention of decodes. One program computes every n-th split of a sequence for one key/value head.

    n is the third dimension of the grid (N, NUM_KV_HEADS, programs per sequence). The outputs are float32: `results`
    [N, NUM_HEADS, MAX_SPLITS, HEAD_DIM], `peaks` and `totals` [N, NUM_HEADS, MAX_SPLITS]. Entries after a sequence's
    last split are not written.
    """
    if WAITS:
        gdc_wait()
        gdc_launch_dependents()
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    sequence = tl.load(sequences + tl.program_id(0))
    if sequence < 0:  # an unused entry of AttentionWork
        return
    kv_head = tl.program_id(1)
    seq_len = tl.load(seq_lens + sequence)
    begin = tl.load(starts + sequence).to(tl.int64)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + rows
    is_row = rows < GROUP
    is_place = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    places = (begin * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(query + places, mask=is_place, other=0.0).to(OPERANDS)
    position = tl.zeros([BLOCK_M], tl.int32) + (seq_len - 1).to(tl.int32)

    first_tile, split_tiles, num_splits = _splits(seq_len, TILE, WINDOW, MIN_TILES, MAX_SPLITS)
    for split in range(tl.program_id(2), num_splits, tl.num_programs(2)):
        low = (first_tile + split * split_tiles) * TILE
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(low, tl.minimum(low + split_tiles * TILE, seq_len), TILE):
            peak, total, result = _absorb(
                peak, total, result, queries, position, start, seq_len, kv_head, tables + sequence * table_width,
                key_cache, value_cache, scale, NUM_KV_HEADS, HEAD_DIM, WIDTH, BLOCK_SIZE, BLOCK_D, TILE, WINDOW,
                SOFTCAP, FORMAT, OPERANDS, False,
            )  # fmt: skip
        part = (tl.program_id(0).to(tl.int64) * NUM_HEADS + head) * MAX_SPLITS + split
        tl.store(peaks + part, peak, mask=is_row)
        tl.store(totals + part, total, mask=is_row)
        tl.store(results + part[:, None] * HEAD_DIM + dims[None, :], result, mask=is_place)


@triton.jit
def join_splits(
    results, peaks, totals, output, sequences, starts, seq_lens, sinks,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, MIN_TILES: tl.constexpr, MAX_SPLITS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Joins the splits of `attend_decodes` into one row per head. Grid: (N, NUM_HEADS)."""
    if WAITS:
        gdc_wait()
        gdc_launch_dependents()
    sequence = tl.load(sequences + tl.program_id(0))
    if sequence < 0:
        return
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens + sequence)
    begin = tl.load(starts + sequence).to(tl.int64)
    _, _, num_splits = _splits(seq_len, TILE, WINDOW, MIN_TILES, MAX_SPLITS)

    splits = tl.arange(0, MAX_SPLITS)
    dims = tl.arange(0, BLOCK_D)
    is_split, is_dim = splits < num_splits, dims < HEAD_DIM
    parts = (tl.program_id(0).to(tl.int64) * NUM_HEADS + head) * MAX_SPLITS + splits
    heights = tl.load(peaks + parts, mask=is_split, other=float("-inf"))
    sums = tl.load(totals + parts, mask=is_split, other=0.0)
    partial = tl.load(
        results + parts[:, None] * HEAD_DIM + dims[None, :], mask=is_split[:, None] & is_dim[None, :], other=0.0
    )

    peak = tl.max(heights, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2E
        peak = tl.maximum(peak, sink)
    weights = tl.exp2(heights - peak)
    total = tl.sum(sums * weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - peak)
    row = tl.sum(partial * weights[:, None], 0) / total
    tl.store(output + (begin * NUM_HEADS + head) * HEAD_DIM + dims, row, mask=is_dim)
