"""Every implementation against attention in double precision, one head and one position at a time."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from backend.attention import ATTENTIONS, create_attention
from backend.attention.base import Attention, AttentionMetadata, AttentionVariant
from backend.attention.native import NativeAttention
from backend.kv_cache import create_kv_format
from backend.kv_cache.base import KvFormat
from backend.kv_cache.plain import PLAIN
from backend.triton_runtime import runs_triton
from tests.backend.levels import RUNNING_LEVELS, library_of

RUN = {"native": bool(RUNNING_LEVELS), "triton": runs_triton(torch.device("cpu"))}  # the others always run
IMPLEMENTATIONS = [
    pytest.param(tuple(name for name in ATTENTIONS if RUN.get(name, True)), id="the highest level"),
    # `make test` does not compile the kernels of other levels.
    pytest.param(
        tuple(f"native {level}" for level in RUNNING_LEVELS), id="all levels", marks=pytest.mark.slow(seconds=0)
    ),
]
NUM_BLOCKS = 192
SCALE = 0.3

STEPS = {
    "one decode": [(1, 7)],
    "decodes of different lengths": [(1, 1), (1, 30), (1, 8), (1, 9)],
    "more decodes than one group": [(1, n) for n in range(1, 21)],
    "whole prompts": [(5, 5), (9, 9), (2, 2)],
    "chunks": [(5, 12), (9, 10), (2, 30)],
    "a chunk of many tiles": [(50, 190), (1, 40)],
    "a chunk across slices": [(30, 530)],
    "a decode of several slices": [(1, 700), (1, 20)],
    "all at once": [(1, 17), (6, 6), (1, 3), (4, 21), (1, 1)],
}


VARIANTS = {
    "everything": AttentionVariant(),
    "a window": AttentionVariant(window=5),
    "a window within a block": AttentionVariant(window=1),
    "a cap": AttentionVariant(softcap=1.5),
    "both": AttentionVariant(window=9, softcap=0.7),
    "sinks": AttentionVariant(),
    "sinks beside a window": AttentionVariant(window=9),
}


def exact(query: Tensor, keys: Tensor, values: Tensor, variant: AttentionVariant) -> Tensor:
    """query: [Lq, Hq, D], keys, values: [L, Hkv, D]."""
    output = torch.empty_like(query, dtype=torch.float64)
    group = query.shape[1] // keys.shape[1]
    for i in range(len(query)):
        end = len(keys) - len(query) + i + 1
        begin = 0 if variant.window is None else max(0, end - variant.window)
        for head in range(query.shape[1]):
            scores = keys[begin:end, head // group].double() @ query[i, head].double() * SCALE
            if variant.softcap is not None:
                scores = variant.softcap * torch.tanh(scores / variant.softcap)
            if variant.sinks is not None:
                scores = torch.cat((scores, variant.sinks[head : head + 1].double()))
            output[i, head] = scores.softmax(0)[: end - begin] @ values[begin:end, head // group].double()
    return output


def create(name: str, kv_format: KvFormat = PLAIN) -> Attention:
    name, _, level = name.partition(" ")
    return (
        NativeAttention(SCALE, kv_format, library_of(level), level)
        if level
        else create_attention(name, SCALE, kv_format)
    )


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("variant_name", VARIANTS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(
    ("block_size", "head_dim", "dtype", "tolerance", "kv_cache_dtype"),
    [
        (8, 16, torch.float32, 1e-5, "auto"),
        (4, 24, torch.bfloat16, 2e-2, "auto"),
        (16, 32, torch.bfloat16, 2e-2, "auto"),
        (4, 24, torch.float32, 1e-5, "int8"),
        (16, 32, torch.bfloat16, 2e-2, "int8"),
        (8, 64, torch.bfloat16, 2e-2, "fp8_e4m3"),
    ],
)
@pytest.mark.parametrize("names", IMPLEMENTATIONS)
def test_every_implementation_is_exact(
    names: tuple[str, ...],
    step: str,
    variant_name: str,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    tolerance: float,
    kv_cache_dtype: str,
) -> None:
    variant = VARIANTS[variant_name]
    if variant_name.startswith("sinks"):
        variant = replace(variant, sinks=torch.linspace(-1.0, 2.0, num_heads))
    generator = torch.Generator().manual_seed(1)
    shuffled = random.Random(2)
    lens = STEPS[step]
    kv_format = create_kv_format(kv_cache_dtype)
    # All unused slots are NaN, so that a single wrong position would show.
    shape = (NUM_BLOCKS, block_size, num_kv_heads, kv_format.width(head_dim))
    formats = {name: create_kv_format(kv_cache_dtype, scales_apart=name == "triton") for name in names}
    caches: dict[str, tuple[Tensor, Tensor]] = {}
    for name in names:
        key_cache, value_cache = torch.zeros((2, *shape), dtype=kv_format.dtype(dtype)).unbind()
        caches[name] = key_cache, value_cache
    unused = torch.full((NUM_BLOCKS * block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
    for name, pair in caches.items():
        for cache in pair:
            formats[name].store(unused, cache, torch.arange(len(unused)))
    free = list(range(NUM_BLOCKS))
    shuffled.shuffle(free)
    queries, expected, tables = [], [], []
    for query_len, seq_len in lens:
        query, keys, values = (
            torch.randn(length, heads, head_dim, generator=generator).to(dtype)
            for length, heads in ((query_len, num_heads), (seq_len, num_kv_heads), (seq_len, num_kv_heads))
        )
        tables.append([free.pop() for _ in range(-(-seq_len // block_size))])
        encoded = kv_format.encode(keys), kv_format.encode(values)
        slots = torch.tensor([tables[-1][i // block_size] * block_size + i % block_size for i in range(seq_len)])
        for name, pair in caches.items():
            for cache, vectors in zip(pair, (keys, values), strict=True):
                formats[name].store(vectors, cache, slots)
        queries.append(query)
        read_keys, read_values = (kv_format.decode(rows, torch.float32) for rows in encoded)
        expected.append(exact(query, read_keys, read_values, variant))
    width = max(map(len, tables))
    metadata = AttentionMetadata(
        query_lens=tuple(query_len for query_len, _ in lens),
        seq_lens=tuple(seq_len for _, seq_len in lens),
        kv_lens=torch.tensor([seq_len for _, seq_len in lens], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([*accumulate((n for n, _ in lens), initial=0)], dtype=torch.int32),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        block_size=block_size,
    )
    for name in names:
        attend = create(name, formats[name]).prepare(metadata, like=queries[0])
        key_cache, value_cache = caches[name]
        output = attend(torch.cat(queries), key_cache, value_cache, variant)
        assert output.dtype == dtype
        assert (output.double() - torch.cat(expected)).abs().max().item() < tolerance, name
