"""Decides which requests advance by how many tokens, preempts requests if blocks run out, applies a step's result.

One rule covers everything: a request has `token_ids`, and each step raises its `num_computed_tokens` towards their
number. A prompt that fits into the token budget is a prefill; one that does not is chunked; a request that is one token
behind decodes. A prefix cache hit starts further on, and a preemption starts again. When a request has caught up, the
next token is sampled and appended, and the request is one token behind again.

    schedule()   spends the budget: running requests first, then waiting ones; allocates their blocks
    advance()    takes in what the runner computed: caches full blocks, appends tokens, finishes requests

Everything here is ints; batch.py turns the plan into tensors.

Minimal path 4 of 9. Next: block_pool.py.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Sequence
from typing import Unpack

from backend.engine.block_pool import BlockPool
from backend.engine.cached_block import content_of, extend_hashes
from backend.engine.counters import SchedulerCounters
from backend.engine.deadlines import Deadlines
from backend.engine.decode_steps import plan_decodes, take_decoded
from backend.engine.errors import ContextTooLong, QueueFull, RequestRefused
from backend.engine.jump_forward import append_forced
from backend.engine.outputs import FinishReason, NewOutput, StepOutput
from backend.engine.plan import RunnerOutput, ScheduledRequest
from backend.engine.pooling import add_pooled, finish_pooled
from backend.engine.request import Request, RequestStatus
from backend.engine.token_budget import TokenBudget


def scheduling_key(request: Request) -> tuple[int, float]:
    """Sorts requests by priority, then by arrival. The first is scheduled first and preempted last."""
    return (request.priority, request.arrived)


class Scheduler:
    """Owns every unfinished request and the block pool. Not thread-safe, except for `check`.

    At most `max_num_seqs` requests run, and at most `max_waiting` more wait.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_waiting: int,
        enable_prefix_caching: bool = True,
        whole_prompts: bool = False,
    ) -> None:
        """With `whole_prompts`, a prompt is computed in one step, which must have room for the longest."""
        self.pool = pool
        self.counters = SchedulerCounters()
        self.running: list[Request] = []  # both are sorted by scheduling_key, so the last running is preempted first
        self.waiting: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._max_unfinished = max_num_seqs + max_waiting
        self._deadlines = Deadlines(2 * self._max_unfinished)
        self._max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._enable_prefix_caching = enable_prefix_caching
        self._whole_prompts = whole_prompts

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._requests)

    def check(self, request: Request) -> None:
        """Raises `RequestRefused` for a request that can never be served. Safe to call from any thread."""
        if not request.prompt_token_ids:
            raise RequestRefused("the prompt has no tokens", param="prompt")
        if request.max_total_tokens > self._max_model_len:
            max_tokens = "" if request.pooling else f" and max_tokens is {request.sampling.max_tokens}"
            raise ContextTooLong(
                f"the prompt has {request.num_prompt_tokens} tokens{max_tokens}, "
                f"but the context holds {self._max_model_len} tokens in all",
                param="prompt" if request.num_prompt_tokens >= self._max_model_len else "max_tokens",
            )
        # The last output token is sampled but never computed, so it needs no slot.
        num_blocks = self._num_blocks(max(request.max_total_tokens - 1, request.num_prompt_tokens))
        if num_blocks > self.pool.num_blocks:
            raise RequestRefused(
                f"the request may need {num_blocks} blocks of KV cache, but there are {self.pool.num_blocks} in all",
                param="max_tokens",
            )

    def add(self, request: Request) -> None:
        """Queues a request. Raises `RequestRefused` or `QueueFull`, and then the scheduler does not keep it."""
        self.check(request)
        if request.request_id in self._requests:
            raise RequestRefused(f"a request with the id {request.request_id!r} is already running", param="request_id")
        if len(self._requests) >= self._max_unfinished:
            raise QueueFull(f"the queue is full: {len(self._requests)} requests are unfinished")
        self._requests[request.request_id] = request
        insort(self.waiting, request, key=scheduling_key)
        self._deadlines.add(request, self._requests.values())

    def schedule(self) -> tuple[ScheduledRequest, ...]:
        """Plans one step within the token budget, in order of priority; within a priority, running requests first."""
        if not self.waiting and (all_decode := plan_decodes(self.running, self.pool, self.max_num_batched_tokens)):
            return all_decode  # optional: the commonest step, planned faster (decode_steps.py)
        budget = TokenBudget(self.max_num_batched_tokens)
        plan: list[ScheduledRequest] = []
        num_seen = 0
        while budget.tokens:
            request = self.running[num_seen] if num_seen < len(self.running) else None
            if self.waiting and (request is None or self.waiting[0].priority < request.priority):
                request = self.waiting[0]
                if not budget.admits(request) or not self._admit(request):
                    break  # no request overtakes: one that waits for many blocks would otherwise wait for ever
            elif request is None:
                break
            num_seen += 1
            if request.awaits_mask:
                continue
            num_uncomputed = request.num_uncomputed_tokens
            num_tokens = request.num_computable(budget.share(request, num_uncomputed))
            if not num_tokens or (self._whole_prompts and num_tokens < num_uncomputed):
                continue
            if not self._grow(request, num_tokens):
                break  # the request was the last running one and has been preempted itself
            plan.append(ScheduledRequest(request, request.num_computed_tokens, num_tokens))
            budget.spend(request, num_uncomputed, num_tokens)
        return tuple(plan)

    def advance(self, plan: Sequence[ScheduledRequest], computed: Sequence[RunnerOutput]) -> list[StepOutput]:
        """Applies the result of a step. A request that has not caught up yet (a chunk of a prompt) has no output."""
        outputs: list[StepOutput] = []
        self.counters.step_tokens.add(sum(scheduled.num_tokens for scheduled in plan))
        for scheduled, result in zip(plan, computed, strict=True):
            if output := take_decoded(self, scheduled, result):  # optional: the commonest result, applied faster
                outputs.append(output)
                continue
            request = scheduled.request
            caught_up = scheduled.catches_up
            request.mask_is_late = result.is_late  # then the last token is computed again
            request.num_computed_tokens = scheduled.end - len(scheduled.drafts) - result.is_late
            self.cache_full_blocks(request, scheduled.start)
            if request.images:
                request.images.release(request.num_computed_tokens)
            if request.pooling:
                request.pooled = add_pooled(request.pooled, result.pooled)
            request.prompt_logprobs += result.prompt_logprobs
            if caught_up and not result.is_late:
                outputs.append(self._take_result(scheduled, result))
        return outputs

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> StepOutput | None:
        """Ends a request between two steps and frees its blocks. None if it is unknown or has ended already."""
        request = self._requests.get(request_id)
        return None if request is None else self.finish(request, reason)

    def stop_early(self, request: Request, num_wanted: int) -> StepOutput | None:
        """Ends a request between two steps, because its first `num_wanted` output tokens are the whole answer.

        Used for stop strings, which only the detokenizer sees. None if the request has ended already.
        """
        self.counters.unwanted_tokens += request.num_output_tokens - num_wanted
        return self.abort(request.request_id, FinishReason.STOP)

    def expire(self, now: float) -> list[StepOutput]:
        """Ends, between two steps, every request whose deadline has passed. `now`: seconds since the epoch."""
        outputs = []
        for deadline, request_id in self._deadlines.pop_until(now):
            request = self._requests.get(request_id)
            if request is not None and request.deadline == deadline:
                outputs.append(self.finish(request, FinishReason.DEADLINE))
        return outputs

    def fail_all(self) -> None:
        """Marks every request as failed, after an error. Frees no blocks, since the pool may be inconsistent."""
        for request in self._requests.values():
            request.status = RequestStatus.FINISHED
            request.finish_reason = FinishReason.ERROR
            self.counters.finished[FinishReason.ERROR] += 1
        self.running, self.waiting, self._requests = [], [], {}
        self._deadlines.clear()

    # -- Blocks ------------------------------------------------------------------------------------------------

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Allocates blocks for the request's next `num_tokens`, preempting the last running requests if necessary.

        Returns False if the request itself was preempted.
        """
        num_new = self._num_blocks(request.num_computed_tokens + num_tokens) - len(request.block_table)
        if num_new <= 0:
            return True
        while (blocks := self.pool.allocate(num_new, background=request.is_background)) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.block_table += blocks
        return True

    def _admit(self, request: Request) -> bool:
        """Starts a waiting request behind its longest cached prefix. False if there is no room.

        It needs blocks for all its known tokens, not only for the first chunk: otherwise two long prompts would preempt
        each other halfway. Running requests of a less urgent priority are preempted for it, the last one first.
        At least the last token is always computed, even if it is cached: its hidden state gives the next token.
        """
        while (blocks := self._allocate_all(request)) is None:
            if not self.running or self.running[-1].priority <= request.priority:
                return False
            self._preempt(self.running[-1])
        self._start(request, *blocks)
        return True

    def _allocate_all(self, request: Request) -> tuple[list[int], int] | None:
        """Blocks for all known tokens of a request, and how many of them hold cached content. None if out of room."""
        if len(self.running) >= self._max_num_seqs:
            return None
        hashes = self.usable_hashes(request)
        cached = self.pool.find_cached_prefix(hashes)
        self.pool.prepare_restore(hashes[len(cached) :], background=request.is_background)
        num_new = self._num_blocks(len(request.token_ids)) - len(cached)
        blocks = self.pool.allocate(num_new, cached, background=request.is_background)
        if blocks is None:
            return None
        num_restored = self.pool.restore(blocks[len(cached) :], hashes[len(cached) :])
        return blocks, len(cached) + num_restored

    def _start(self, request: Request, blocks: list[int], num_cached: int) -> None:
        self.waiting.remove(request)
        insort(self.running, request, key=scheduling_key)
        request.status = RequestStatus.RUNNING
        request.block_table = blocks
        request.num_computed_tokens = num_cached * self.pool.block_size
        if not request.timing.scheduled:
            request.timing.scheduled = time.time()
            request.num_cached_tokens = request.num_computed_tokens
            self.counters.prefix_cache_queries += request.num_prompt_tokens if self._reads_cache(request) else 0
            self.counters.prefix_cache_hits += request.num_cached_tokens

    def _preempt(self, request: Request) -> None:
        """Moves a running request back to the queue, to be recomputed: mostly from its own blocks, if still cached."""
        self.running.remove(request)
        insort(self.waiting, request, key=scheduling_key)
        self.pool.free(request.block_table)
        request.status = RequestStatus.WAITING
        request.block_table = []
        request.num_computed_tokens = 0
        request.pooled = []
        request.prompt_logprobs = []
        request.num_preemptions += 1
        self.counters.preemptions += 1

    def _reads_cache(self, request: Request) -> bool:
        return self._enable_prefix_caching and not request.needs_all_hidden

    def usable_hashes(self, request: Request) -> list[bytes]:
        """The hashes of the request's full blocks that may come from the cache: never the last token's."""
        if not self._reads_cache(request):
            return []
        num_full = (len(request.token_ids) - 1) // self.pool.block_size
        extend_hashes(request, num_full, self.pool.block_size)
        return request.block_hashes[:num_full]

    def cache_full_blocks(self, request: Request, start: int) -> None:
        """Makes the blocks findable that have become full since token `start`."""
        if not self._enable_prefix_caching:
            return
        block_size = self.pool.block_size
        num_full = request.num_computed_tokens // block_size
        if num_full == start // block_size:
            return
        extend_hashes(request, num_full, block_size)
        for i in range(start // block_size, num_full):
            self.pool.cache_block(request.block_table[i], content_of(request, i, block_size))

    # -- Results -----------------------------------------------------------------------------------------------

    def _take_result(self, scheduled: ScheduledRequest, result: RunnerOutput) -> StepOutput:
        """Turns the result for a request that has caught up into its output: tokens or a vector, maybe the end."""
        request = scheduled.request
        if not request.timing.first_token:
            request.timing.first_token = time.time()
            self.counters.count_prompt(request)
        if result.error is not None:
            return self.finish(request, FinishReason.ERROR, error=result.error)
        if request.pooling:
            vector = finish_pooled(request.pooling, request.pooled, request.num_prompt_tokens)
            return self.finish(request, FinishReason.STOP, pooled=vector)
        reports_prompt = request.sampling.prompt_logprobs is not None and not request.num_output_tokens
        prompt_logprobs = tuple(request.prompt_logprobs) if reports_prompt else None
        reason = None if request.sampling.max_tokens else FinishReason.LENGTH
        num_new = 0
        num_valid = min(len(result.token_ids), self.counters.count_accepted(scheduled.drafts, result.token_ids) + 1)
        while reason is None and num_new < num_valid:
            token_id = result.token_ids[num_new]
            request.append(token_id)
            reason = self._finish_reason(request, token_id)
            num_new += 1
        self.counters.generation_tokens += num_new
        if num_new > 1:  # all but the last were accepted drafts, whose keys and values this step has computed
            request.num_computed_tokens += num_new - 1
            self.cache_full_blocks(request, scheduled.start)
        forced: tuple[int, ...] = ()
        if reason is None and request.grammar:  # optional: tokens that the grammar forces (jump_forward.py)
            forced, reason = append_forced(request, self._finish_reason)
            self.counters.generation_tokens += len(forced)
        new: NewOutput = {
            "new_token_ids": result.token_ids[:num_new] + forced,
            "logprobs": result.logprobs[:num_new],
            "prompt_logprobs": prompt_logprobs,
        }
        return self.finish(request, reason, **new) if reason else self._output(request, **new)

    @staticmethod
    def _finish_reason(request: Request, token_id: int) -> FinishReason | None:
        """Why the request ends with this token, its newest; None if it continues."""
        sampling = request.sampling
        if token_id in sampling.stop_token_ids and request.num_output_tokens >= sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if request.num_output_tokens >= sampling.max_tokens else None

    def finish(self, request: Request, reason: FinishReason, **new: Unpack[NewOutput]) -> StepOutput:
        """Ends a request and frees its blocks. Returns its last output."""
        (self.running if request.status is RequestStatus.RUNNING else self.waiting).remove(request)
        del self._requests[request.request_id]
        self.pool.free(request.block_table)
        request.block_table = []
        request.adapter = None  # frees an unloaded adapter with its last request
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.timing.finished = time.time()
        self.counters.finished[reason] += 1
        return self._output(request, **new)

    @staticmethod
    def _output(request: Request, **new: Unpack[NewOutput]) -> StepOutput:
        return StepOutput(
            request_id=request.request_id,
            finish_reason=request.finish_reason,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            timing=request.timing if request.finish_reason else None,
            **new,
        )
