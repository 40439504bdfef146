"""The tokens of a plan as numbers: ids, positions and slots, one column for each token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backend.engine.plan import ScheduledRequest


def make_tokens(plan: Sequence[ScheduledRequest], block_size: int) -> NDArray[np.int64]:
    """The ids, positions and slots of all tokens of a plan: [3, T]."""
    numbers = np.empty((3, sum(scheduled.num_tokens for scheduled in plan)), np.int64)
    write_tokens(plan, block_size, numbers)
    return numbers


def write_tokens(plan: Sequence[ScheduledRequest], block_size: int, numbers: NDArray[np.int64]) -> None:
    """Writes what `make_tokens` returns to existing memory."""
    begin = 0
    for scheduled in plan:
        start, num_tokens = scheduled.start, scheduled.num_tokens
        table = scheduled.request.block_table
        if num_tokens == 1:  # with arrays, it takes several times as long
            slot = table[start // block_size] * block_size + start % block_size
            numbers[:, begin] = scheduled.token_ids[0], start, slot
        else:
            first = start // block_size
            blocks = np.array(table[first : -(-scheduled.end // block_size)])
            part = numbers[:, begin : begin + num_tokens]
            part[0] = scheduled.token_ids
            part[1] = positions = np.arange(start, scheduled.end)
            part[2] = blocks[positions // block_size - first] * block_size + positions % block_size
        begin += num_tokens
