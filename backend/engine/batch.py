"""Turns a plan into tensors. Past this module and sampling_batch.py, there are no requests, only rows.

A batch has no padding: the T tokens of a step lie one after the other in one dimension, sequence by sequence.
`slot_mapping` says where each token's keys and values are stored, and the block tables say where attention finds those
of earlier tokens.

Minimal path 6 of 9. Next: runner.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from backend.attention.base import AttentionMetadata
from backend.attention.uploads import upload
from backend.engine.plan import ScheduledRequest
from backend.engine.sampling_batch import NextToken
from backend.engine.step_adapters import StepAdapters
from backend.engine.token_arrays import NOTHING_UNKNOWN, make_tokens


@dataclass(frozen=True, slots=True)
class OutputRows:
    """The W of a step's T tokens whose final hidden states are used: the last ones of some of its sequences.

    The last layer computes only keys and values for all other tokens.
    """

    rows: Tensor  # [W] int64: their positions among the T tokens
    attention: AttentionMetadata  # as if these were the only new tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one step: T tokens of S sequences, one sequence after the other."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64: block * block_size + offset
    next_tokens: tuple[NextToken, ...]  # the N tokens to sample
    sampled: tuple[int, ...]  # for each of them, the index of its request in the plan
    sampled_rows: Tensor  # [N] int64: for each of them, the row of the token before it among the output rows
    attention: AttentionMetadata
    output_rows: OutputRows | None = None  # None: the hidden states of all tokens are used
    output_lens: tuple[int, ...] = ()  # how many tokens of each sequence are output rows, its last ones
    adapters: StepAdapters | None = None  # None: no sequence uses an adapter


def make_batch(
    plan: Sequence[ScheduledRequest],
    block_size: int,
    device: torch.device,
    unknown: Mapping[str, int] = NOTHING_UNKNOWN,
) -> Batch:
    """The tensors of a non-empty plan, on `device`, without waiting for it. `unknown`: as in `make_tokens`."""

    def tensor(values: Sequence[int] | Sequence[list[int]], dtype: type[np.generic]) -> Tensor:
        return upload(torch.from_numpy(np.array(values, dtype)), device)  # several times faster than torch.tensor

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

    per_token = upload(torch.from_numpy(make_tokens(plan, block_size, unknown)), device)
    query_lens = tuple(scheduled.num_tokens for scheduled in plan)
    output_lens = _output_lens(plan)
    output_rows = None
    if output_lens != query_lens:
        ends = accumulate(query_lens)
        rows = [row for end, count in zip(ends, output_lens, strict=True) for row in range(end - count, end)]
        some = [scheduled for scheduled, count in zip(plan, output_lens, strict=True) if count]
        output_rows = OutputRows(tensor(rows, np.int64), attention(some, tuple(filter(None, output_lens))))
    next_tokens, sampled, sampled_rows = find_sampled(plan, output_lens)
    return Batch(
        input_ids=per_token[0],
        positions=per_token[1],
        slot_mapping=per_token[2],
        next_tokens=next_tokens,
        sampled=sampled,
        sampled_rows=tensor(sampled_rows, np.int64),
        attention=attention(plan, query_lens),
        output_rows=output_rows,
        output_lens=output_lens,
        adapters=StepAdapters.of(plan, query_lens, output_lens, device),
    )


def find_sampled(
    plan: Sequence[ScheduledRequest], output_lens: Sequence[int]
) -> tuple[tuple[NextToken, ...], tuple[int, ...], list[int]]:
    """The tokens to sample, and the `Batch.sampled` and `Batch.sampled_rows` of them.

    One token is sampled after the last known token of each request, and one after each of its drafts.
    """
    sampled = [(i, n) for i, s in enumerate(plan) if not s.request.pooling for n in range(s.num_sampled, 0, -1)]
    ends = [*accumulate(output_lens)]
    next_tokens = tuple(NextToken(plan[i].request, plan[i].drafts[: len(plan[i].drafts) + 1 - n]) for i, n in sampled)
    return next_tokens, tuple(i for i, _ in sampled), [ends[i] - n for i, n in sampled]


def _output_lens(plan: Sequence[ScheduledRequest]) -> tuple[int, ...]:
    """How many of each sequence's last tokens have hidden states that are used.

    At least one in all, so that later code need not handle a step without output rows. In a step of decodes, all.
    """
    if all(scheduled.num_tokens == 1 for scheduled in plan):
        return (1,) * len(plan)
    lens = [s.num_tokens if s.request.needs_all_hidden else s.num_sampled for s in plan]
    return tuple(lens) if any(lens) else (*lens[:-1], 1)
