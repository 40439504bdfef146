"""The kernels do not read memory that they have not written, and a row's bits depend on no other row."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from backend.attention.base import AttentionMetadata, AttentionVariant
from backend.attention.native import NativeAttention
from tests.backend.levels import AMX, LEVELS, library_of

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 32
LONGEST = 96
NUM_SEQS = 200


def decodes(count: int, seq_len: int, block_size: int) -> AttentionMetadata:
    """Decodes of `count` sequences, all in the first blocks."""
    return AttentionMetadata(
        query_lens=(1,) * count,
        seq_lens=(seq_len,) * count,
        kv_lens=torch.full((count,), seq_len, dtype=torch.int32),
        cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32),
        block_tables=torch.arange(-(-seq_len // block_size), dtype=torch.int32).repeat(count, 1),
        block_size=block_size,
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_stale_memory_is_not_read(level: str, dtype: torch.dtype, block_size: int) -> None:
    """Neither what the previous call left, which is NaN, nor this call's own data in the same place.

    With so many rows, some have scores of which a part would be NaN if it were read as a weight.
    """
    attention = NativeAttention(0.3, native=library_of(level), level_name=level, num_threads=1)
    generator = torch.Generator().manual_seed(1)
    shape = (LONGEST // block_size, block_size, NUM_KV_HEADS, HEAD_DIM)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    queries = torch.randn(NUM_SEQS, NUM_HEADS, HEAD_DIM, generator=generator).to(dtype)

    def attend(queries: Tensor, seq_len: int) -> Tensor:
        return attention.prepare(decodes(len(queries), seq_len, block_size), queries)(queries, keys, values)

    for seq_len in (1, 7, 15, 16, 17, 31, 32, 33, 48):
        before = attend(queries, seq_len)
        assert before.isfinite().all()
        assert attend(torch.full_like(queries[:1], torch.nan), LONGEST).isnan().all()
        assert torch.equal(attend(queries, seq_len), before)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("shape", [(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM), (16, 16, 128)])
def test_bits_depend_neither_on_the_batch_nor_on_the_threads(
    level: str, dtype: torch.dtype, window: int | None, shape: tuple[int, int, int]
) -> None:
    """Slices of a long sequence are tasks of their own, unless there are enough rows without.

    The larger shape processes fewer positions at once in a task with all heads than in a task with some of them.
    """
    num_heads, num_kv_heads, head_dim = shape
    block_size, num_blocks = 16, 70
    generator = torch.Generator().manual_seed(1)
    cache = (num_blocks, block_size, num_kv_heads, head_dim)
    keys, values = (torch.randn(cache, generator=generator).to(dtype) for _ in range(2))
    queries = torch.randn(40, num_heads, head_dim, generator=generator).to(dtype)
    lens = [1100, 255, 256, 257, *range(500, 536)]

    def attend(rows: range, num_threads: int) -> Tensor:
        attention = NativeAttention(0.3, native=library_of(level), level_name=level, num_threads=num_threads)
        seq_lens = tuple(lens[row] for row in rows)
        metadata = decodes(len(rows), max(lens), block_size)
        metadata = replace(metadata, seq_lens=seq_lens, kv_lens=torch.tensor(seq_lens, dtype=torch.int32))
        given = queries[rows.start : rows.stop]
        sinks = torch.linspace(-1.0, 2.0, num_heads)
        return attention.prepare(metadata, given)(given, keys, values, AttentionVariant(window=window, sinks=sinks))

    together = attend(range(40), 1)
    assert torch.equal(attend(range(40), 3), together)
    for rows in (range(1), range(1, 4), range(2, 3)):
        assert torch.equal(attend(rows, 1), together[rows.start : rows.stop])
        assert torch.equal(attend(rows, 3), together[rows.start : rows.stop])


@pytest.mark.parametrize("level", [level for level in LEVELS if level != AMX])
@pytest.mark.parametrize("window", [None, 300])
def test_bits_of_a_prompt_depend_neither_on_its_chunks_nor_on_the_threads(level: str, window: int | None) -> None:
    """In bfloat16, where several tiles of rows go along the positions together."""
    block_size, length = 16, 600
    generator = torch.Generator().manual_seed(1)
    shape = (-(-length // block_size), block_size, NUM_KV_HEADS, HEAD_DIM)
    keys, values = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    queries = torch.randn(length, NUM_HEADS, HEAD_DIM, generator=generator).bfloat16()
    variant = AttentionVariant(window=window, sinks=torch.linspace(-1.0, 2.0, NUM_HEADS))

    def attend(first: int, end: int, num_threads: int) -> Tensor:
        attention = NativeAttention(0.3, native=library_of(level), level_name=level, num_threads=num_threads)
        metadata = replace(
            decodes(1, end, block_size),
            query_lens=(end - first,),
            cu_seqlens_q=torch.tensor([0, end - first], dtype=torch.int32),
        )
        given = queries[first:end]
        return attention.prepare(metadata, given)(given, keys, values, variant)

    whole = attend(0, length, 1)
    assert torch.equal(attend(0, length, 3), whole)
    for bounds in ([0, 300, length], [0, 41, 290, 555, length]):
        chunks = [attend(first, end, 1) for first, end in pairwise(bounds)]
        assert torch.equal(torch.cat(chunks), whole)
