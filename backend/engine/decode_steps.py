"""The commonest step: every running request decodes one token, and none waits. Optional: the scheduler does the same.

With hundreds of sequences, its general rules would take several milliseconds per step on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from backend.engine.block_pool import BlockPool
from backend.engine.outputs import FinishReason, StepOutput
from backend.engine.plan import RunnerOutput, ScheduledRequest
from backend.engine.request import Request

if TYPE_CHECKING:
    from backend.engine.scheduler import Scheduler


def plan_decodes(running: Sequence[Request], pool: BlockPool, max_tokens: int) -> tuple[ScheduledRequest, ...] | None:
    """The step's plan, if every running request is one token behind and there are blocks for all of these tokens.

    Otherwise None: then `Scheduler.schedule` decides, with the blocks that were allocated here.
    """
    if len(running) > max_tokens:
        return None
    block_size = pool.block_size
    plan = []
    for request in running:
        start = request.num_computed_tokens
        if start + 1 != len(request.token_ids) or request.mask_is_late:
            return None
        if start == len(request.block_table) * block_size:
            blocks = pool.allocate(1, background=request.is_background)
            if blocks is None:
                return None
            request.block_table += blocks
        plan.append(ScheduledRequest(request, start, 1))
    return tuple(plan)


def take_decoded(scheduler: Scheduler, scheduled: ScheduledRequest, result: RunnerOutput) -> StepOutput | None:
    """Applies the token that one decode has sampled, as `Scheduler.advance` does. Returns the request's output.

    None, and nothing has changed, if the request needs more than that.
    """
    request, token_ids = scheduled.request, result.token_ids
    if not request.is_plain_or_penalised or request.grammar or scheduled.num_tokens != 1 or len(token_ids) != 1:
        return None
    if scheduled.drafts or not request.timing.first_token:
        return None
    request.num_computed_tokens = end = scheduled.start + 1
    if end % scheduler.pool.block_size == 0:
        scheduler.cache_full_blocks(request, scheduled.start)
    request.append(token_ids[0])
    scheduler.counters.generation_tokens += 1
    sampling = request.sampling
    if token_ids[0] in sampling.stop_token_ids:
        return scheduler.finish(request, FinishReason.STOP, new_token_ids=token_ids)
    if len(request.token_ids) - len(request.prompt_token_ids) >= sampling.max_tokens:
        return scheduler.finish(request, FinishReason.LENGTH, new_token_ids=token_ids)
    return StepOutput(
        request.request_id,
        token_ids,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
    )
