"""Triton's attention against torch's, over random steps: any heads, lengths, blocks, variants and cache formats.

Runs in Triton's interpreter on a CPU (TRITON_INTERPRET=1), or on a GPU.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend

from backend.attention import create_attention
from backend.attention.base import AttentionMetadata, AttentionVariant, AttentionWork
from backend.kv_cache import KV_FORMATS, create_kv_format
from backend.triton_runtime import runs_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(not runs_triton(DEVICE), reason="no GPU, and no TRITON_INTERPRET=1 with triton")

SCALE = 0.25
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    lens: tuple[tuple[int, int], ...]  # number of new tokens and of all tokens, for each sequence
    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_cache_dtype: str
    variant: AttentionVariant
    seed: int


def sequences() -> st.SearchStrategy[tuple[int, int]]:
    decodes = st.integers(1, 700).map(lambda length: (1, length))
    chunks = st.tuples(st.integers(2, 70), st.integers(0, 200)).map(lambda c: (c[0], c[0] + c[1]))
    return st.one_of(decodes, chunks)


cases = st.builds(
    Case,
    lens=st.lists(sequences(), min_size=1, max_size=4).map(tuple),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    head_dim=st.sampled_from([32, 64, 96, 128]),
    block_size=st.sampled_from([1, 4, 16, 24, 64]),
    dtype=st.sampled_from([*TOLERANCES]),
    kv_cache_dtype=st.sampled_from([*KV_FORMATS]),
    variant=st.builds(
        AttentionVariant, window=st.none() | st.integers(1, 300), softcap=st.none() | st.floats(0.5, 50.0)
    ),
    seed=st.integers(0, 1 << 30),
)


@given(case=cases, has_sinks=st.booleans(), num_units=st.sampled_from([1, 8, 40]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_random_steps(case: Case, has_sinks: bool, num_units: int) -> None:
    """With more multiprocessors, the keys of a captured step's tiles are divided into splits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("backend.attention.triton"), "_num_units", lambda device: num_units)
        check_step(case, has_sinks)


def check_step(case: Case, has_sinks: bool) -> None:
    shuffled, generator = random.Random(case.seed), torch.Generator().manual_seed(case.seed)
    kv_format = create_kv_format(case.kv_cache_dtype, scales_apart=True)
    num_blocks = [-(-seq_len // case.block_size) for _, seq_len in case.lens]
    free = list(range(sum(num_blocks) + 3))
    shuffled.shuffle(free)
    tables = [[free.pop() for _ in range(count)] for count in num_blocks]
    # Unused slots are NaN, if the format has NaN.
    shape = (sum(num_blocks) + 3, case.block_size, case.kv_heads, kv_format.width(case.head_dim))
    empty = torch.nan if kv_format.dtype(case.dtype).is_floating_point else 127
    caches = [torch.full(shape, empty, dtype=kv_format.dtype(case.dtype)) for _ in range(2)]
    for (_, seq_len), table in zip(case.lens, tables, strict=True):
        size = case.block_size
        slots = torch.tensor([table[i // size] * size + i % size for i in range(seq_len)])
        for cache in caches:
            vectors = torch.randn(seq_len, case.kv_heads, case.head_dim, generator=generator).to(case.dtype)
            kv_format.store(vectors, cache, slots)
    num_heads = case.kv_heads * case.group
    num_tokens = sum(query_len for query_len, _ in case.lens)
    query = torch.randn(num_tokens, num_heads, case.head_dim, generator=generator).to(case.dtype).to(DEVICE)
    keys, values = (cache.to(DEVICE) for cache in caches)
    sinks = torch.randn(num_heads, generator=generator).to(DEVICE) if has_sinks else None
    variant = replace(case.variant, sinks=sinks)
    width = max(num_blocks)
    metadata = AttentionMetadata(
        query_lens=tuple(query_len for query_len, _ in case.lens),
        seq_lens=tuple(seq_len for _, seq_len in case.lens),
        kv_lens=torch.tensor([seq_len for _, seq_len in case.lens], dtype=torch.int32, device=DEVICE),
        cu_seqlens_q=torch.tensor(
            [*accumulate((n for n, _ in case.lens), initial=0)], dtype=torch.int32, device=DEVICE
        ),
        block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32, device=DEVICE),
        block_size=case.block_size,
    )
    attention = create_attention("triton", SCALE, kv_format)
    ours = attention.prepare(metadata, like=query)(query, keys, values, variant)
    tile = attention.tile_tokens(max(metadata.query_lens), num_heads, case.kv_heads, like=query)
    captured = replace(metadata, work=work_of(metadata, tile))
    as_captured = attention.prepare(captured, like=query)(query, keys, values, variant)
    # In float32, from the same numbers: a GPU's own bfloat16 kernels are as far from it as ours.
    exact = query.float()
    blocks = torch.arange(len(keys), device=DEVICE)
    exact_keys, exact_values = (
        kv_format.load(cache, blocks, case.dtype).float().unflatten(0, (-1, case.block_size))
        for cache in (keys, values)
    )
    expected = create_attention("sdpa", SCALE).prepare(metadata, like=exact)(exact, exact_keys, exact_values, variant)
    for each in (ours, as_captured):
        assert each.dtype == case.dtype
        error = (each.float() - expected).abs() / (1.0 + expected.abs())
        assert error.max().item() < TOLERANCES[case.dtype]


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("window", [None, 5])
def test_long_prompts_of_which_nothing_is_cached(
    monkeypatch: pytest.MonkeyPatch, block_size: int, window: int | None
) -> None:
    """Torch's own attention computes them, as cuDNN on a Hopper GPU, beside decodes and other prompts."""
    module = import_module("backend.attention.triton")
    monkeypatch.setattr(module, "MIN_WHOLE", 20)
    monkeypatch.setattr(module, "WHOLE_STEP", 16)
    monkeypatch.setattr(module, "SDPBackend", SimpleNamespace(CUDNN_ATTENTION=SDPBackend.MATH, MATH=SDPBackend.MATH))
    monkeypatch.setattr(module.TritonAttention, "_attends_whole", lambda self, like: True)
    computed: list[int] = []
    causal = module._causal

    def counted(queries: torch.Tensor, *others: object) -> torch.Tensor:
        computed.append(len(queries))
        result: torch.Tensor = causal(queries, *others)
        return result

    monkeypatch.setattr(module, "_causal", counted)
    lens = ((1, 20), (33, 33), (5, 9), (48, 48), (30, 40))
    check_step(Case(lens, 2, 2, 32, block_size, torch.float32, "auto", AttentionVariant(window), 0), has_sinks=False)
    assert computed == ([] if window else [48, 48])


def work_of(metadata: AttentionMetadata, tile: int) -> AttentionWork:
    """The lists of a captured step, with some unused entries."""
    lens = [*enumerate(metadata.query_lens)]
    decodes = [i for i, length in lens if length == 1]
    tiles = [(i, first) for i, length in lens if length > 1 for first in range(0, length, tile)]
    return AttentionWork(
        torch.tensor([*decodes, -1, -1], dtype=torch.int32, device=DEVICE),
        torch.tensor([*tiles, (-1, -1)], dtype=torch.int32, device=DEVICE),
        max(metadata.query_lens),
    )


@pytest.mark.parametrize("seq_len", [3, 130, 1500])
def test_a_decode_is_bitwise_the_same_in_every_batch(seq_len: int) -> None:
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(200, 16, 2, 32, generator=generator).to(DEVICE) for _ in range(2))
    query = torch.randn(40, 4, 32, generator=generator).to(DEVICE)
    table = list(range(-(-seq_len // 16)))

    def attend(query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> torch.Tensor:
        starts = [*accumulate(query_lens, initial=0)]
        metadata = AttentionMetadata(
            query_lens=query_lens,
            seq_lens=seq_lens,
            kv_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
            cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
            block_tables=torch.tensor([table] * len(seq_lens), dtype=torch.int32, device=DEVICE),
            block_size=16,
        )
        return create_attention("triton", SCALE).prepare(metadata, query)(query[: starts[-1]], keys, values)[0]

    alone = attend((1,), (seq_len,))
    assert torch.equal(alone, attend((1,) * 40, (seq_len, *[3] * 39)))
    assert torch.equal(alone, attend((1, 1, 1), (seq_len, 1, 2)))
    assert torch.equal(alone, attend((1, 2, 1), (seq_len, 2, 3)))
