"""Predicts the next step, so that a GPU can start it before the host has read the current one.

    plan      = scheduler.schedule()           each request's next token
    next_plan = plan_ahead(scheduler, plan)    the token after that
    computed  = runner.run(plan, next_plan)    starts `next_plan` on the device, then waits for `plan` only

The prediction holds if no request arrives or ends in between. The scheduler does not rely on it: it decides the next
step as usual. A part of the started step is used if the scheduler's plan contains it, and dropped otherwise. The keys
and values that a dropped part wrote lie after all known tokens and are overwritten. A block that changed its owner in
between is also safe: a device runs one operation after another, so the new owner writes later.
"""

from __future__ import annotations

from collections.abc import Sequence

from backend.engine.plan import ScheduledRequest
from backend.engine.scheduler import Scheduler
from backend.engine.spare_blocks import reserve_blocks


def plan_ahead(scheduler: Scheduler, plan: Sequence[ScheduledRequest]) -> tuple[ScheduledRequest, ...]:
    """The next token of every request that continues after this step; empty if any of them cannot be predicted.

    All or none, because a second step beside the predicted one would cost more than the prediction saves. Reserves
    blocks for the tokens, as far as there are spare ones.
    """
    next_plan = []
    block_size = scheduler.pool.block_size
    for scheduled in plan:
        request = scheduled.request
        if not scheduled.is_decode or request.adapter or not request.can_sample_ahead:
            return ()
        if request.num_output_tokens + 1 >= request.sampling.max_tokens:
            continue  # it ends with this step
        if scheduled.end >= len(request.block_table) * block_size and reserve_blocks(scheduler, request, 1) < 1:
            return ()
        next_plan.append(ScheduledRequest(request, scheduled.end, 1))
    return tuple(next_plan)
