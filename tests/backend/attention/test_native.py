"""The kernels do not read memory that they have not written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backend.attention.base import AttentionMetadata
from backend.attention.native import NativeAttention
from tests.backend.levels import LEVELS, library_of

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
