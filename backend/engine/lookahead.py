"""What the next step will be if nobody comes and nobody ends: so that a GPU may begin it before this one is read.

    plan      = scheduler.schedule()        each its next token
    following = plan_ahead(scheduler, plan)    each the token behind that
    computed  = runner.run(plan, following) begins `following` on the device, then waits for `plan` alone

Whatever happens in between, the scheduler decides anew. What was begun counts for those whose next part it turns out to
be, and is forgotten for the others: their keys and values stand behind all that anybody knows of, and are written over.
A block that has changed hands is written by its new owner later than that, since a device does one thing after another.
"""

from __future__ import annotations

from collections.abc import Sequence

from backend.engine.plan import ScheduledRequest
from backend.engine.request import Request
from backend.engine.scheduler import Scheduler


def plan_ahead(scheduler: Scheduler, plan: Sequence[ScheduledRequest]) -> tuple[ScheduledRequest, ...]:
    """All of a step's requests that go on behind it, or none: a second step beside the foreseen one would cost more
    than foresight saves. Makes room for their tokens, as far as there are blocks to spare."""
    following = []
    block_size = scheduler.pool.block_size
    for scheduled in plan:
        request = scheduled.request
        if not is_decode(scheduled) or not is_plain(request, ahead=1):
            return ()
        if request.num_output_tokens + 1 >= request.sampling.max_tokens:
            continue  # it ends with this step
        if scheduled.end >= len(request.block_table) * block_size and scheduler.reserve(request, 1) < 1:
            return ()
        following.append(ScheduledRequest(request, scheduled.end, 1))
    return tuple(following)


def is_decode(scheduled: ScheduledRequest) -> bool:
    """Whether a part is one token, behind which one is sampled, and nothing else."""
    return scheduled.num_tokens == 1 == scheduled.num_sampled and not scheduled.request.needs_all_hidden


def is_plain(request: Request, ahead: int = 0) -> bool:
    """Whether the token `ahead` of the next is the likeliest, or drawn by temperature alone: whatever the tokens before
    it, and with nothing to be told of it."""
    sampling = request.sampling
    filters = sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0
    forbids = sampling.logit_bias or sampling.bad_words or request.num_output_tokens + ahead < sampling.min_tokens
    return not (filters or forbids or sampling.has_penalties or request.grammar or sampling.logprobs is not None)
