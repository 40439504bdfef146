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
from backend.engine.output_rows import find_output_lens, find_sampled
from backend.engine.plan import ScheduledRequest
from backend.engine.sampling_batch import NextToken
from backend.engine.step_adapters import StepAdapters
from backend.engine.step_images import StepImages
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
    images: StepImages | None = None  # None: all tokens are text


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

    numbers = make_tokens(plan, block_size, unknown)
    per_token = upload(torch.from_numpy(numbers), device)
    query_lens = tuple(scheduled.num_tokens for scheduled in plan)
    output_lens = find_output_lens(plan)
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
        images=StepImages.of(plan, numbers[1], device),
    )
