"""Which tokens of a plan have hidden states that are used, and which tokens are sampled from them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from backend.engine.plan import ScheduledRequest
from backend.engine.sampling_batch import NextToken


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


def find_output_lens(plan: Sequence[ScheduledRequest]) -> tuple[int, ...]:
    """How many of each sequence's last tokens have hidden states that are used.

    At least one in all, so that later code need not handle a step without output rows. In a step of decodes, all.
    """
    if all(scheduled.num_tokens == 1 for scheduled in plan):
        return (1,) * len(plan)
    lens = [s.num_tokens if s.request.needs_all_hidden else s.num_sampled for s in plan]
    return tuple(lens) if any(lens) else (*lens[:-1], 1)
