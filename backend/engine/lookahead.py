"""Predicts the next step, so that a GPU can start it before the host has read the current one.

    plan      = scheduler.schedule()           each request's next tokens
    next_plan = plan_ahead(scheduler, plan)    the tokens after those, such as a prompt's next chunk
    computed  = runner.run(plan, next_plan)    starts `next_plan` on the device, then waits for `plan` only

The prediction holds if no request arrives or ends in between. The scheduler does not rely on it: it decides the next
step as usual. A part of the started step is used if the scheduler's plan contains it, and dropped otherwise. The keys
and values that a dropped part wrote lie after all computed tokens and are overwritten. A block that changed its owner
in between is also safe: a device runs one operation after another, so the new owner writes later.
"""

from __future__ import annotations

from collections.abc import Sequence

from backend.engine.plan import ScheduledRequest
from backend.engine.request import Request
from backend.engine.scheduler import Scheduler
from backend.engine.spare_blocks import reserve_blocks
from backend.engine.token_budget import TokenBudget


def plan_ahead(scheduler: Scheduler, plan: Sequence[ScheduledRequest]) -> tuple[ScheduledRequest, ...]:
    """What the requests that continue after this step compute next; empty if that of any of them cannot be predicted.

    All or none, because a second step beside the predicted one would cost more than the prediction saves. Reserves
    blocks for the tokens, as far as there are spare ones. Prompts of background work are not predicted: a more urgent
    request that arrives would wait for two steps of them.
    """
    next_plan = []
    for scheduled in plan:
        if not scheduled.is_decode:
            return _plan_mixed_ahead(scheduler, plan)
        request = scheduled.request
        if request.adapter or not request.can_sample_ahead:
            return ()
        if request.num_output_tokens + 1 >= request.sampling.max_tokens:
            continue  # it ends with this step
        if not _has_blocks(scheduler, request, scheduled.end + 1):
            return ()
        next_plan.append(ScheduledRequest(request, scheduled.end, 1))
    return tuple(next_plan)


def _plan_mixed_ahead(scheduler: Scheduler, plan: Sequence[ScheduledRequest]) -> tuple[ScheduledRequest, ...]:
    """As `plan_ahead`, for steps with prompts: spends the next step's budget as `Scheduler.schedule` will."""
    parts = {scheduled.request.request_id: scheduled for scheduled in plan}
    budget = TokenBudget(scheduler.max_num_batched_tokens)
    next_plan: list[ScheduledRequest] = []
    for request in scheduler.running:
        part = parts.get(request.request_id)
        samples = part is not None and part.catches_up
        if request.adapter or request.needs_prompt or (part and part.drafts):
            return ()
        if request.images and (part.end if part else request.num_computed_tokens) < request.images.end:
            return ()
        if samples and not request.has_plain_sampling():
            return ()
        if samples and request.num_output_tokens + 1 >= request.sampling.max_tokens:
            continue
        start = part.end if part else request.num_computed_tokens
        num_left = len(request.token_ids) + samples - start
        num_tokens = 0 if request.mask_is_late else budget.share(request, num_left)
        if not num_tokens:
            continue
        budget.spend(request, num_left, num_tokens)
        is_background_prompt = request.is_background and num_left > 1
        is_special = num_tokens in (num_left, 1) and not request.has_plain_sampling(ahead=int(samples))
        if is_background_prompt or is_special or not _has_blocks(scheduler, request, start + num_tokens):
            return ()
        next_plan.append(ScheduledRequest(request, start, num_tokens))
    return tuple(next_plan)


def _has_blocks(scheduler: Scheduler, request: Request, num_tokens: int) -> bool:
    """Whether a request has blocks for so many tokens, its last known token and the next one included."""
    is_room = num_tokens <= len(request.block_table) * scheduler.pool.block_size
    return is_room or reserve_blocks(scheduler, request, num_tokens - len(request.token_ids)) > 0
