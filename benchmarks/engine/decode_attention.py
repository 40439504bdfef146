"""Attention of one decode step beside the memory's speed: `python -m benchmarks.engine.decode_attention`.

The keys and values of one sequence are in blocks whose order in memory is ascending, descending or random. A prompt's
blocks are ascending in a new engine, and descending if they were freed before. All layers run one after the other, so
their keys and values exceed the caches. Each round reads as many bytes from one piece of memory, then runs each order.
The figures are medians of the rounds' ratios. If other processes use the cores, `--threads 1 --clock cpu` still gives
valid ratios.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from backend.attention.base import AttentionMetadata
from backend.attention.native import NativeAttention
from backend.huge_pages import HugePages
from benchmarks.engine.cpu import CLOCKS, MemoryRead, cpu_name, seconds_of

BLOCK_TOKENS = 16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 12, 4, 64  # of the shape `tiny`
CACHE_BYTES = 200 << 20  # keys and values of all layers
ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "ascending": lambda blocks: blocks,
    "descending": lambda blocks: blocks.flip(0),
    "random": lambda blocks: blocks[torch.randperm(len(blocks), generator=torch.Generator().manual_seed(1))],
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention of one decode step beside the memory's speed.")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 16_384])
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: all")
    parser.add_argument("--clock", choices=[*CLOCKS], default="wall", help="cpu: valid for one thread only")
    parser.add_argument("--level", help="instruction sets, for example avx2 (default: the highest)")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    attention = NativeAttention(HEAD_DIM**-0.5, level_name=args.level, num_threads=args.threads)
    print(f"{cpu_name()}, {args.threads} threads, {args.clock} time, kernels {attention.call.level_name}")
    clock = CLOCKS[args.clock]
    with tempfile.TemporaryDirectory() as directory:
        memory = MemoryRead(CACHE_BYTES, args.threads, Path(directory), clock)
    for context in args.contexts:
        steps = {name: step(attention, context, order) for name, order in ORDERS.items()}
        rounds = []
        for _ in range(args.rounds):
            limit = memory.bytes_per_second(tries=1)
            next(iter(steps.values()))[1]()  # not measured: the threads of the read spin for a while after it
            rounds.append({name: num / seconds_of(run, clock) / limit for name, (num, run) in steps.items()})
        ratios = (f"{name} {statistics.median(found[name] for found in rounds):.2f}" for name in steps)
        print(f"{context:6} tokens, fractions of the memory's speed: {', '.join(ratios)}")


def step(attention: NativeAttention, context: int, order: Callable[[Tensor], Tensor]) -> tuple[int, Callable[[], None]]:
    """Attention of one token over so many, in as many layers as CACHE_BYTES has room for: their bytes, and one call."""
    num_blocks = context // BLOCK_TOKENS
    num_layers = CACHE_BYTES // (2 * context * NUM_KV_HEADS * HEAD_DIM * torch.bfloat16.itemsize)
    shape = (num_layers, 2, num_blocks, BLOCK_TOKENS, NUM_KV_HEADS, HEAD_DIM)
    caches = HugePages().zeros(shape, torch.bfloat16).fill_(0.5)
    query = torch.randn(1, NUM_HEADS, HEAD_DIM).bfloat16()
    metadata = AttentionMetadata(
        query_lens=(1,),
        seq_lens=(context,),
        kv_lens=torch.tensor([context], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        block_tables=order(torch.arange(num_blocks, dtype=torch.int32)).unsqueeze(0).contiguous(),
        block_size=BLOCK_TOKENS,
    )
    attend = attention.prepare(metadata, query)
    recorded: list[bytes] = []
    attention.call.recorded = recorded
    outputs = [attend(query, keys, values) for keys, values in caches]
    attention.call.recorded = None
    operations = ctypes.create_string_buffer(b"".join(recorded))

    def run(memory: object = (query, caches, metadata, outputs)) -> None:  # which the operations point to
        attention.call.run(ctypes.addressof(operations), num_layers)

    return caches.nbytes, run


if __name__ == "__main__":
    main()
