"""Blocks for tokens that may never come: drafts (speculation/) and predicted steps (lookahead.py)."""

from __future__ import annotations

from backend.engine.request import Request
from backend.engine.scheduler import Scheduler


def reserve_blocks(scheduler: Scheduler, request: Request, num_tokens: int) -> int:
    """Allocates blocks for up to `num_tokens` tokens after a running request's last one, from spare blocks only.

    One free block per running request is left over, so that no request is preempted for the sake of such tokens.
    Returns for how many tokens there is room.
    """
    pool = scheduler.pool
    num_spare = max(0, pool.num_free - len(scheduler.running))
    num_tokens = min(num_tokens, (len(request.block_table) + num_spare) * pool.block_size - len(request.token_ids))
    num_blocks = -(-(len(request.token_ids) + num_tokens) // pool.block_size)
    num_new = num_blocks - len(request.block_table)
    request.block_table += pool.allocate(max(0, num_new), background=request.is_background) or []
    return num_tokens
