"""The tokens of a plan as numbers: ids, positions and slots, one column for each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.engine.plan import ScheduledRequest

NOTHING_UNKNOWN: Mapping[str, int] = MappingProxyType({})


def make_tokens(
    plan: Sequence[ScheduledRequest], block_size: int, unknown: Mapping[str, int] = NOTHING_UNKNOWN
) -> NDArray[np.int64]:
    """The ids, positions and slots of all tokens of a plan: [3, T]. If a part has tokens of an image, its positions
    are wrong from there on; `StepImages` has those.

    unknown: where a launched step will have put the token that a request continues with, by request id. Instead of an
    id, such a token has -1 minus that place, and `with_sampled` looks it up.
    """
    numbers = np.empty((3, sum(scheduled.num_tokens for scheduled in plan)), np.int64)
    write_tokens(plan, block_size, numbers, unknown)
    return numbers


def with_sampled(ids: Tensor, sampled: Tensor) -> Tensor:
    """The ids that `make_tokens` makes, with those that were unknown: [T] int64. `sampled`: what places refer to."""
    return torch.where(ids < 0, sampled.index_select(0, (-1 - ids).clamp(min=0)), ids)


def write_tokens(
    plan: Sequence[ScheduledRequest],
    block_size: int,
    numbers: NDArray[np.int64],
    unknown: Mapping[str, int] = NOTHING_UNKNOWN,
) -> None:
    """Writes what `make_tokens` returns to existing memory."""
    begin = 0
    for scheduled in plan:
        start, num_tokens = scheduled.start, scheduled.num_tokens
        table = scheduled.request.block_table
        images = scheduled.request.images
        offset = images.position_offset(start) if images else 0  # with images, positions are not indexes
        if num_tokens == 1:  # with arrays, it takes several times as long
            slot = table[start // block_size] * block_size + start % block_size
            known = scheduled.token_ids
            token_id = known[0] if known else -1 - unknown[scheduled.request.request_id]
            numbers[:, begin] = token_id, start + offset, slot
        else:
            first = start // block_size
            blocks = np.array(table[first : -(-scheduled.end // block_size)])
            part = numbers[:, begin : begin + num_tokens]
            part[0] = scheduled.token_ids
            indexes = np.arange(start, scheduled.end)
            part[1] = indexes + offset
            part[2] = blocks[indexes // block_size - first] * block_size + indexes % block_size
        begin += num_tokens
