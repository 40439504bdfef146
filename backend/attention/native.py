"""The kernels of backend/native: keys and values are read where they lie in the pool, once for all heads that share
them. In bfloat16, prompts take matrix products; heads that these do not suit are gathered for torch."""

from __future__ import annotations

import torch
from torch import Tensor

from backend.attention.base import FULL_ATTENTION, Attention, AttentionMetadata, AttentionVariant, StepAttention
from backend.attention.sdpa import SdpaAttention
from backend.kv_cache.base import KvFormat
from backend.kv_cache.plain import PLAIN
from backend.native import library
from backend.native.library import DTYPES, KV_FORMATS, Caller, Library

MAX_QUERY_LEN = 16  # of a sequence, beyond which one dot product after the other is slower than gathering


class NativeAttention(Attention):
    def __init__(
        self,
        scale: float,
        form: KvFormat = PLAIN,
        native: Library | None = None,
        level_name: str | None = None,
        num_threads: int | None = None,
    ) -> None:
        """As many threads as torch has now, unless told otherwise. Raises RuntimeError without the kernels."""
        super().__init__(scale)
        native = native or library.load()
        if native is None:
            raise RuntimeError("the native kernels cannot be compiled on this machine")
        self.call = native.caller(num_threads or torch.get_num_threads(), level_name)
        self._form = form
        self._gathered = SdpaAttention(scale, form)

    def prepare(self, metadata: AttentionMetadata, like: Tensor) -> StepAttention:
        # In float32, what is exact to the bit in every batch is preferred to what is fast.
        is_exact = like.dtype is torch.float32
        if is_exact or self._has_tiles(metadata, like) or max(metadata.query_lens) <= MAX_QUERY_LEN:
            return _Step(self.call, metadata, self.scale, self._form)
        return self._gathered.prepare(metadata, like)

    def _has_tiles(self, metadata: AttentionMetadata, like: Tensor) -> bool:
        """Whether the kernels take prompts as matrix products."""
        match self.call.level_name:
            case "amx":
                return like.shape[-1] % 32 == 0 and metadata.block_size % 16 == 0
            case "avx512":
                return like.shape[-1] % 32 == 0
            case _:
                return like.shape[-1] % 16 == 0


class _Step(StepAttention):
    def __init__(self, call: Caller, metadata: AttentionMetadata, scale: float, form: KvFormat) -> None:
        self._call = call
        self._scale = scale
        self._form = KV_FORMATS[form.name]
        self._tables = metadata.block_tables
        self._starts = metadata.cu_seqlens_q
        self._seq_lens = metadata.kv_lens
        self._layout = (len(metadata.seq_lens), metadata.block_tables.shape[1], metadata.block_size)

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, span: AttentionVariant = FULL_ATTENTION
    ) -> Tensor:
        query = query.contiguous()
        output = torch.empty_like(query)
        self._call(
            library.ATTEND,
            query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), output.data_ptr(),
            self._tables.data_ptr(), self._starts.data_ptr(), self._seq_lens.data_ptr(),
            0 if span.sinks is None else span.sinks.data_ptr(),
            *self._layout, query.shape[1], key_cache.shape[2], query.shape[2], DTYPES[query.dtype], self._form,
            span.window or 0, self._scale, span.softcap or 0.0,
        )  # fmt: skip
        return output
