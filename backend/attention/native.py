"""Attention by the native CPU kernels (backend/native), which read keys and values directly from the KV blocks.

The kernels read each key and value once for all query heads that share it. In bfloat16, they compute prompts with
matrix multiplications. If the kernels do not support a prompt's head size, torch computes the prompt (sdpa.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.attention.base import FULL_ATTENTION, Attention, AttentionMetadata, AttentionVariant, StepAttention
from backend.attention.sdpa import SdpaAttention
from backend.kv_cache.base import KvFormat
from backend.kv_cache.plain import PLAIN
from backend.native import library
from backend.native.library import DTYPES, KV_FORMATS, Caller, Library

MAX_QUERY_LEN = 16  # new tokens per sequence; with more, single dot products are slower than gathering blocks


class NativeAttention(Attention):
    """Attention by the native CPU kernels."""

    def __init__(
        self,
        scale: float,
        kv_format: KvFormat = PLAIN,
        native: Library | None = None,
        level_name: str | None = None,
        num_threads: int | None = None,
    ) -> None:
        """Loads the native kernels. Raises RuntimeError if they cannot be compiled.

        kv_format: with scales in the same rows, if it has any. Raises ValueError for another one.
        `num_threads` is the number of compute threads. None means as many as torch uses now.
        """
        super().__init__(scale)
        native = native or library.load()
        if native is None:
            raise RuntimeError("the native kernels cannot be compiled on this machine")
        self.call = native.caller(num_threads or torch.get_num_threads(), level_name)
        if kv_format.scales_apart:
            raise ValueError(f"these kernels read scales in the rows of a cache of {kv_format.name}")
        self._kv_format = kv_format
        self._gathered = SdpaAttention(scale, kv_format)

    def prepare(self, metadata: AttentionMetadata, like: Tensor) -> StepAttention:
        """Returns the kernels' attention, or torch's for long bfloat16 prompts of an unsupported head size."""
        # In float32, always use the kernels: their results are bitwise the same in every batch. In float32 that matters
        # more than speed.
        is_exact = like.dtype is torch.float32
        if is_exact or self._has_matrix_products(metadata, like) or max(metadata.query_lens) <= MAX_QUERY_LEN:
            return _NativeStep(self.call, metadata, self.scale, self._kv_format)
        return self._gathered.prepare(metadata, like)

    def _has_matrix_products(self, metadata: AttentionMetadata, like: Tensor) -> bool:
        """Whether the kernels compute prompts of this head size with matrix multiplications."""
        match self.call.level_name:
            case "amx":
                return like.shape[-1] % 32 == 0 and metadata.block_size % 16 == 0
            case "avx512":
                return like.shape[-1] % 32 == 0
            case _:
                return like.shape[-1] % 16 == 0


class _NativeStep(StepAttention):
    def __init__(self, call: Caller, metadata: AttentionMetadata, scale: float, kv_format: KvFormat) -> None:
        self._call = call
        self._scale = scale
        self._kv_format = KV_FORMATS[kv_format.name]
        self._tables = metadata.block_tables
        self._starts = metadata.cu_seqlens_q
        self._seq_lens = metadata.kv_lens
        self._layout = (len(metadata.seq_lens), metadata.block_tables.shape[1], metadata.block_size)

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, variant: AttentionVariant = FULL_ATTENTION
    ) -> Tensor:
        query = query.contiguous()
        output = torch.empty_like(query)
        self._call(
            library.ATTEND,
            query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), output.data_ptr(),
            self._tables.data_ptr(), self._starts.data_ptr(), self._seq_lens.data_ptr(),
            0 if variant.sinks is None else variant.sinks.data_ptr(),
            *self._layout, query.shape[1], key_cache.shape[2], query.shape[2], DTYPES[query.dtype], self._kv_format,
            variant.window or 0, self._scale, variant.softcap or 0.0,
        )  # fmt: skip
        return output
