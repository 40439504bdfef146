"""Attention by the Triton kernels of triton_kernels.py, which read keys and values directly from the KV blocks.

A sequence with several new tokens is divided into tiles of a few tokens each. On Hopper, cuDNN computes long prompts of
which nothing is cached. For a sequence with one new token, the
cached tokens are divided into splits, which run in parallel (flash-decoding). The kernel launches of a decode step do
not depend on the lengths of its sequences. So a CUDA graph can capture the step.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from backend.attention.base import FULL_ATTENTION, Attention, AttentionMetadata, AttentionVariant, StepAttention
from backend.attention.triton_kernels import FP8, INT8, PLAIN, attend_chunks, attend_decodes, join_chunks, join_splits
from backend.attention.uploads import upload
from backend.kv_cache.base import KvFormat
from backend.kv_cache.plain import PLAIN as PLAIN_FORMAT
from backend.kv_cache.plain import PlainFormat
from backend.kv_cache.scaled import Fp8Format, Int8Format
from backend.triton_runtime import early_start, is_interpreted, starts_early

logger = logging.getLogger(__name__)  # INFO: progress

FORMAT_CODES: dict[type[KvFormat], int] = {PlainFormat: PLAIN.value, Int8Format: INT8.value, Fp8Format: FP8.value}
MIN_DOT = 16  # rows and columns of the smallest matrix product
TILE_BYTES = 1 << 14  # bytes of keys that are read at once, and as many bytes of values
MIN_TILE, MAX_TILE = 16, 64  # in tokens
CHUNK_ROWS = 128  # rows of a prompt's tile: tokens times the query heads that share a key/value head
# Maximum numbers in a prompt's tile, so wide heads have fewer rows. Tensor cores do not compute exact float32, so the
# results of float32 multiplications stay in registers.
CHUNK_NUMBERS = {torch.bfloat16: 1 << 14, torch.float32: 1 << 11}
WIDE_TILE = 1 << 13  # from this many numbers in a tile's result, a program uses eight warps instead of four
# Bytes of keys that a prompt's program reads at once, and how many of its steps are loaded ahead: more with the shared
# memory of a Hopper GPU. On an H100, prompts of 8,192 tokens then run at 385 TFLOP/s, and at 357 with the others.
CHUNK_TILES = ((1 << 14, 2), (1 << 15, 3))
MAX_CHUNK_TILE = 128
LARGE_SHARED_MEMORY = (9, 10)  # major compute capabilities with 227 KiB for a program: Hopper, and Blackwell in servers
# Prompts of at least this many tokens, of which nothing is cached, are computed by cuDNN. Lengths are padded to
# multiples of the step. With fewer tokens, the padding costs more than cuDNN saves.
MIN_WHOLE, WHOLE_STEP = 2560, 512
WHOLE_HEAD_DIMS, WHOLE_CAPABILITY = (64, 128), 9
MIN_TILES = 2  # minimum tiles per split; smaller splits are not worth joining
MAX_SPLITS = 32  # per sequence
# Programs per multiprocessor that the tiles of a captured step are divided into, if they are few: a short prompt behind
# a long cached prefix reads many keys with few queries. Splits per tile, and how many are joined at a time.
CHUNK_PROGRAMS_PER_UNIT, MAX_CHUNK_SPLITS, JOINED_SPLITS = 2, 16, 4
PROGRAMS_PER_UNIT = 4  # programs per multiprocessor of the GPU that a decode step is divided into


class TritonAttention(Attention):
    """Attention by Triton kernels, on a GPU or in Triton's interpreter."""

    def __init__(self, scale: float, kv_format: KvFormat = PLAIN_FORMAT) -> None:
        """kv_format: with its scales apart, if it has any. Raises ValueError for another one."""
        super().__init__(scale)
        self._format_code = FORMAT_CODES[type(kv_format)]
        if self._format_code != PLAIN.value and not kv_format.scales_apart:
            raise ValueError(f"these kernels read scales apart from a cache of {kv_format.name}")

    def prepare(self, metadata: AttentionMetadata, like: Tensor) -> StepAttention:
        return _TritonStep(metadata, self.scale, self._format_code, self._attends_whole(like))

    def warm_up_lengths(self, longest: int, like: Tensor) -> list[int]:
        return [*range(MIN_WHOLE, longest + 1, WHOLE_STEP)] if self._attends_whole(like) else []

    def _attends_whole(self, like: Tensor) -> bool:
        """Whether cuDNN can compute prompts, and is faster than `attend_chunks`."""
        is_plain = self._format_code == PLAIN.value and like.dtype in (torch.bfloat16, torch.float16)
        return is_plain and like.shape[-1] in WHOLE_HEAD_DIMS and has_fast_cudnn(like.device)

    def tile_tokens(self, longest: int, num_heads: int, num_kv_heads: int, like: Tensor) -> int:
        group = num_heads // num_kv_heads
        return _tile_rows(longest, group, like.shape[-1], like.dtype) // group


class _TritonStep(StepAttention):
    def __init__(self, metadata: AttentionMetadata, scale: float, format_code: int, attends_whole: bool) -> None:
        """attends_whole: whether cuDNN computes long prompts of which nothing is cached."""
        self._metadata = metadata
        self._scale = scale
        self._format_code = format_code
        # By tokens per tile, and omitted sequences. Usually the same for all layers.
        self._tiles: dict[tuple[int, frozenset[int]], Tensor] = {}
        self._whole: frozenset[int] = frozenset()  # sequences that `_attend_whole` computes
        self._decodes = metadata.work.decodes if metadata.work else _decodes_of(metadata)
        self._num_chunks: int | None = None  # sequences with several new tokens; None: only the device knows
        if metadata.work:
            self._longest = metadata.work.longest
        else:
            if attends_whole:
                pairs = zip(metadata.query_lens, metadata.seq_lens, strict=True)
                self._whole = frozenset(i for i, (new, all_) in enumerate(pairs) if new == all_ >= MIN_WHOLE)
            self._longest = max(metadata.query_lens)
            self._num_chunks = len(metadata.query_lens) - len(self._decodes)

    def __call__(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, variant: AttentionVariant = FULL_ATTENTION
    ) -> Tensor:
        query = query.contiguous()
        output = torch.empty_like(query)
        if len(self._decodes):
            self._attend_decodes(query, key_cache, value_cache, output, variant)
        whole = self._whole if variant == FULL_ATTENTION and variant.sinks is None else frozenset()
        for sequence in sorted(whole):
            self._attend_whole(sequence, query, key_cache, value_cache, output)
        if self._num_chunks is None or self._num_chunks > len(whole):
            self._attend_chunks(query, key_cache, value_cache, output, variant, whole)
        return output

    def _attend_whole(
        self, sequence: int, query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor
    ) -> None:
        """A long prompt of which nothing is cached, by cuDNN, in tensors padded with zeros.

        Causal queries do not see the padding behind them. On an H200, cuDNN computes 567 to 617 TFLOP/s for 8,192
        tokens, and `attend_chunks` 353 to 378.
        """
        metadata, length = self._metadata, self._metadata.query_lens[sequence]
        begin, block_size = sum(metadata.query_lens[:sequence]), metadata.block_size
        padded = _padded_whole(length)
        blocks = metadata.block_tables[sequence, : -(-length // block_size)]
        queries = query[begin : begin + length]
        if padded > length:
            queries = torch.cat((queries, query.new_zeros((padded - length, *query.shape[1:]))))
        keys, values = (_gathered(cache, blocks, length, padded) for cache in (key_cache, value_cache))
        output[begin : begin + length] = _causal(queries, keys, values, self._scale)[:length]

    def _attend_chunks(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        output: Tensor,
        variant: AttentionVariant,
        without: frozenset[int],
    ) -> None:
        metadata, num_kv_heads = self._metadata, key_cache.shape[2]
        group = query.shape[1] // num_kv_heads
        tile_bytes, num_stages = chunk_tiles(query.device)
        constants = self._constants(query, key_cache, variant, tile_bytes, MAX_CHUNK_TILE)
        block_m = _tile_rows(self._longest, group, query.shape[2], query.dtype)
        block_q = block_m // group
        tiles = metadata.work.tiles if metadata.work else self._tiles_of(block_q, without)
        splits = 1
        if metadata.work:
            num_programs = triton.cdiv(metadata.work.longest, block_q) * num_kv_heads
            wanted = CHUNK_PROGRAMS_PER_UNIT * _num_units(query.device) // num_programs
            splits = max(1, min(MAX_CHUNK_SPLITS, wanted))
        shape = (len(tiles), num_kv_heads, splits, block_m)
        results = peaks = totals = None
        if splits > 1:
            results = query.new_empty((*shape, constants["BLOCK_D"]), dtype=torch.float32)
            peaks, totals = query.new_empty((2, *shape), dtype=torch.float32)
        attend_chunks[len(tiles), num_kv_heads, splits](
            query, key_cache, value_cache, output, results, peaks, totals,
            tiles, metadata.cu_seqlens_q, metadata.kv_lens, metadata.block_tables,
            variant.sinks, metadata.block_tables.stride(0), self._scale,
            NUM_HEADS=query.shape[1],
            BLOCK_M=block_m,
            BLOCK_Q=block_q,
            HAS_SINKS=variant.sinks is not None,
            HAS_SPLITS=splits > 1,
            **constants,
            num_warps=8 if block_m * constants["BLOCK_D"] >= WIDE_TILE else 4,
            num_stages=num_stages,
        )  # fmt: skip
        if splits > 1:
            join_chunks[len(tiles), num_kv_heads](
                output, results, peaks, totals, tiles, metadata.cu_seqlens_q, splits,
                NUM_HEADS=query.shape[1],
                BLOCK_M=block_m,
                BLOCK_Q=block_q,
                JOINED=JOINED_SPLITS,
                **{name: constants[name] for name in ("NUM_KV_HEADS", "HEAD_DIM", "BLOCK_D")},
                num_warps=8 if block_m * constants["BLOCK_D"] >= WIDE_TILE else 4,
            )  # fmt: skip

    def _tiles_of(self, size: int, without: frozenset[int]) -> Tensor:
        """Returns the tiles of the sequences with several new tokens, except those in `without`: [num_tiles, 2] int32.

        A row is the sequence and the first of the tile's tokens. A tile has up to `size` tokens.
        """
        if (size, without) not in self._tiles:
            lens = [(i, n) for i, n in enumerate(self._metadata.query_lens) if n > 1 and i not in without]
            tiles = [(i, first) for i, length in lens for first in range(0, length, size)]
            device = self._metadata.block_tables.device
            self._tiles[size, without] = upload(torch.tensor(tiles, dtype=torch.int32), device)
        return self._tiles[size, without]

    def _attend_decodes(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor, variant: AttentionVariant
    ) -> None:
        metadata, size = self._metadata, len(self._decodes)
        num_heads, num_kv_heads, head_dim = query.shape[1], key_cache.shape[2], query.shape[2]
        parts = (size, num_heads, MAX_SPLITS)
        results = torch.empty((*parts, head_dim), dtype=torch.float32, device=query.device)
        peaks, totals = torch.empty((2, *parts), dtype=torch.float32, device=query.device)
        constants = self._constants(query, key_cache, variant)
        waits = len(query) == 1 and starts_early(query.device)
        wanted = PROGRAMS_PER_UNIT * _num_units(query.device)
        attend_decodes[size, num_kv_heads, min(MAX_SPLITS, -(-wanted // (size * num_kv_heads)))](
            query, key_cache, value_cache, results, peaks, totals,
            self._decodes, metadata.cu_seqlens_q, metadata.kv_lens, metadata.block_tables,
            metadata.block_tables.stride(0), self._scale,
            NUM_HEADS=num_heads,
            BLOCK_M=max(MIN_DOT, triton.next_power_of_2(num_heads // num_kv_heads)),
            MIN_TILES=MIN_TILES,
            MAX_SPLITS=MAX_SPLITS,
            **constants,
            **early_start(waits),
            num_warps=4,
            num_stages=2,
        )  # fmt: skip
        join_splits[size, num_heads](
            results, peaks, totals, output, self._decodes, metadata.cu_seqlens_q, metadata.kv_lens, variant.sinks,
            NUM_HEADS=num_heads,
            HAS_SINKS=variant.sinks is not None,
            MIN_TILES=MIN_TILES,
            MAX_SPLITS=MAX_SPLITS,
            **{name: constants[name] for name in ("HEAD_DIM", "BLOCK_D", "TILE", "WINDOW")},
            **early_start(waits),
        )  # fmt: skip

    def _constants(
        self,
        query: Tensor,
        key_cache: Tensor,
        variant: AttentionVariant,
        tile_bytes: int = TILE_BYTES,
        max_tile: int = MAX_TILE,
    ) -> dict[str, Any]:
        """Returns the constants that the kernels are compiled for. Triton's interpreter cannot multiply bfloat16."""
        head_dim = query.shape[2]
        block_d = _block_of(head_dim)
        tile = tile_bytes // (block_d * query.element_size())
        return {
            "NUM_KV_HEADS": key_cache.shape[2],
            "HEAD_DIM": head_dim,
            "WIDTH": key_cache.shape[3],
            "BLOCK_SIZE": key_cache.shape[1],
            "BLOCK_D": block_d,
            "TILE": min(max_tile, max(MIN_TILE, tile)),
            "WINDOW": variant.window or 0,
            "SOFTCAP": variant.softcap or 0.0,
            "FORMAT": self._format_code,
            "OPERANDS": tl.bfloat16 if query.dtype is torch.bfloat16 and not is_interpreted() else tl.float32,
        }


def _padded_whole(length: int) -> int:
    """The length to which a long prompt is padded for cuDNN, which prepares itself for each length for 0.07 s."""
    return -(-length // WHOLE_STEP) * WHOLE_STEP


def _gathered(cache: Tensor, blocks: Tensor, length: int, padded: int) -> Tensor:
    """The first `length` rows of these blocks, and zeros up to `padded` rows: [padded, Hkv, D]."""
    block_size = cache.shape[1]
    gathered = cache.new_zeros((max(-(-padded // block_size), len(blocks)), *cache.shape[1:]))
    torch.index_select(cache, 0, blocks, out=gathered[: len(blocks)])
    rows = gathered.flatten(0, 1)[:padded]
    rows[length:] = 0  # what a block held before
    return rows


def _causal(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention of whole sequences, by cuDNN on a GPU: [T, Hq, D] and twice [T, Hkv, D] -> [T, Hq, D]."""
    query, key, value = (each.transpose(0, 1)[None] for each in (queries, keys, values))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if query.is_cuda else SDPBackend.MATH):
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return attended[0].transpose(0, 1)


@cache
def has_fast_cudnn(device: torch.device) -> bool:
    """Whether cuDNN's attention works on this device and is faster than the kernels here: on Hopper."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != WHOLE_CAPABILITY:
        return False
    queries, keys = (torch.zeros(WHOLE_STEP, n, 128, dtype=torch.bfloat16, device=device) for n in (2, 1))
    try:
        _causal(queries, keys, keys, 1.0)
    except RuntimeError as error:  # how torch reports that its cuDNN is missing or too old
        logger.info("Long prompts are computed without cuDNN: %s", error)
        return False
    return True


def _decodes_of(metadata: AttentionMetadata) -> Tensor:
    """The sequences with one new token, [N] int32."""
    lens, device = metadata.query_lens, metadata.block_tables.device
    if lens.count(1) == len(lens):
        return torch.arange(len(lens), dtype=torch.int32, device=device)
    return upload(torch.tensor([i for i, length in enumerate(lens) if length == 1], dtype=torch.int32), device)


def _block_of(head_dim: int) -> int:
    return max(MIN_DOT, int(triton.next_power_of_2(head_dim)))


def _tile_rows(longest: int, group: int, head_dim: int, dtype: torch.dtype) -> int:
    """Rows of a prompt's tile, tokens times heads, if the longest sequence has `longest` new tokens."""
    most = min(CHUNK_ROWS, CHUNK_NUMBERS[dtype] // _block_of(head_dim))
    wanted = int(triton.next_power_of_2(longest * group))
    return max(MIN_DOT, int(triton.next_power_of_2(group)), min(most, wanted))


@cache
def _num_units(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 1


@cache
def chunk_tiles(device: torch.device) -> tuple[int, int]:
    """The pair of CHUNK_TILES for this device."""
    if device.type != "cuda":
        return CHUNK_TILES[0]
    return CHUNK_TILES[torch.cuda.get_device_capability(device)[0] in LARGE_SHARED_MEMORY]
