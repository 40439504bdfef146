"""From a plan to tensors. Here and in sampling_batch.py requests become tensors; everything past it knows rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from backend.attention.base import AttentionMetadata
from backend.engine.plan import ScheduledRequest
from backend.engine.sampling_batch import NextToken


@dataclass(frozen=True, slots=True)
class Tail:
    """The W of a step's tokens whose final hidden states anybody reads: the last ones of some of its sequences."""

    rows: Tensor  # [W] int64: where they stand among the T
    attention: AttentionMetadata  # as if they were all that is new


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input. T tokens of S sequences, one sequence after the other."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64: block * block_size + offset
    next_tokens: tuple[NextToken, ...]  # the N tokens that are to be sampled
    sampled: tuple[int, ...]  # whose they are, by place in the plan
    sampled_rows: Tensor  # [N] int64: where the tokens before them stand among those that are read
    attention: AttentionMetadata
    tail: Tail | None = None  # None: all tokens are read
    output_lens: tuple[int, ...] = ()  # how many tokens of each sequence are read, its last ones


def make_batch(plan: Sequence[ScheduledRequest], block_size: int, device: torch.device) -> Batch:
    def tensor(values: Sequence[int] | Sequence[list[int]], dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(np.array(values, dtype)).to(device)  # several times faster than torch.tensor

    def attention(sequences: Sequence[ScheduledRequest], query_lens: tuple[int, ...]) -> AttentionMetadata:
        seq_lens = tuple(scheduled.end for scheduled in sequences)
        tables = [scheduled.request.block_table for scheduled in sequences]
        max_blocks = max(map(len, tables))
        return AttentionMetadata(
            query_lens=query_lens,
            seq_lens=seq_lens,
            kv_lens=tensor(seq_lens, np.int32),
            cu_seqlens_q=tensor([*accumulate(query_lens, initial=0)], np.int32),
            block_tables=tensor([table + [0] * (max_blocks - len(table)) for table in tables], np.int32),
            block_size=block_size,
        )

    positions = [position for scheduled in plan for position in range(scheduled.start, scheduled.end)]
    slots = [
        scheduled.request.block_table[position // block_size] * block_size + position % block_size
        for scheduled in plan
        for position in range(scheduled.start, scheduled.end)
    ]
    token_ids = [*chain.from_iterable(scheduled.token_ids for scheduled in plan)]
    per_token = tensor([token_ids, positions, slots], np.int64)
    query_lens = tuple(scheduled.num_tokens for scheduled in plan)
    output_lens = _read_lens(plan)
    tail = None
    if output_lens != query_lens:
        ends = accumulate(query_lens)
        rows = [row for end, count in zip(ends, output_lens, strict=True) for row in range(end - count, end)]
        some = [scheduled for scheduled, count in zip(plan, output_lens, strict=True) if count]
        tail = Tail(tensor(rows, np.int64), attention(some, tuple(filter(None, output_lens))))
    # Behind the last known token, and behind each that was drafted.
    sampled = [(i, n) for i, s in enumerate(plan) if not s.request.pooling for n in range(s.num_sampled, 0, -1)]
    read_ends = [*accumulate(output_lens)]
    return Batch(
        input_ids=per_token[0],
        positions=per_token[1],
        slot_mapping=per_token[2],
        next_tokens=tuple(
            NextToken(plan[i].request, plan[i].drafts[: len(plan[i].drafts) + 1 - n]) for i, n in sampled
        ),
        sampled=tuple(i for i, _ in sampled),
        sampled_rows=tensor([read_ends[i] - n for i, n in sampled], np.int64),
        attention=attention(plan, query_lens),
        tail=tail,
        output_lens=output_lens,
    )


def _read_lens(plan: Sequence[ScheduledRequest]) -> tuple[int, ...]:
    """Of each sequence, how many of its last tokens have hidden states that anybody reads. At least one is read of all,
    so that nothing behind needs to know of steps without any; and of a step that has one of each, all."""
    if all(scheduled.num_tokens == 1 for scheduled in plan):
        return (1,) * len(plan)
    lens = [s.num_tokens if s.request.needs_all_hidden else s.num_sampled for s in plan]
    return tuple(lens) if any(lens) else (*lens[:-1], 1)
