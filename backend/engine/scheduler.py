"""Who advances by how many tokens in the next step, and what the result means for each request.

One rule makes everything: a request has `token_ids`, and each step raises its `num_computed_tokens` towards their
number. A prompt that fits the budget is a prefill, one that does not is chunked, one token behind is a decode, a
cached prefix is a chase that starts further on, and preemption is one that starts again. When a request has caught
up, the model's next token is sampled and appended, and the chase goes on.

Only ints are decided on here; what they mean as tensors is `batch.py`'s business.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import TypedDict, Unpack

from backend.engine.block_pool import ROOT_HASH, BlockPool, CachedBlock, hash_block
from backend.engine.counters import SchedulerCounters
from backend.engine.errors import ContextTooLong, QueueFull, RequestRefused
from backend.engine.plan import RunnerOutput, ScheduledRequest, count_accepted
from backend.engine.request import FinishReason, Request, RequestStatus, StepOutput, TokenLogprob
from backend.engine.token_budget import TokenBudget


class _New(TypedDict, total=False):
    """What a step adds to a request's output, by `StepOutput`'s names."""

    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] | None
    embedding: tuple[float, ...] | None
    error: str | None


def scheduling_key(request: Request) -> tuple[int, float]:
    """Whoever sorts first is served first and preempted last."""
    return (request.priority, request.arrived)


class Scheduler:
    """Owns every unfinished request, and the pool.

    `max_waiting` bounds how many may wait beyond the `max_num_seqs` that can run.
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
    ) -> None:
        self.pool = pool
        self.counters = SchedulerCounters()
        self.running: list[Request] = []  # both by scheduling_key, so that the last to run is the first to be preempted
        self.waiting: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap, which still names some requests that have ended
        self._max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._max_waiting = max_waiting
        self._enable_prefix_caching = enable_prefix_caching

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._requests)

    def check(self, request: Request) -> None:
        """Raises `RequestRefused` for a request that could never be served. Safe to call from any thread."""
        if not request.prompt_token_ids:
            raise RequestRefused("the prompt has no tokens", param="prompt")
        if request.max_total_tokens > self._max_model_len:
            asked = "" if request.pooling else f" and max_tokens is {request.sampling.max_tokens}"
            raise ContextTooLong(
                f"the prompt has {request.num_prompt_tokens} tokens{asked}, "
                f"but the context holds {self._max_model_len} tokens in all",
                param="prompt" if request.num_prompt_tokens >= self._max_model_len else "max_tokens",
            )
        # The last token is sampled and never computed, so it needs no room.
        num_blocks = self._num_blocks(max(request.max_total_tokens - 1, request.num_prompt_tokens))
        if num_blocks > self.pool.num_blocks:
            raise RequestRefused(
                f"the request may need {num_blocks} blocks of KV cache, but there are {self.pool.num_blocks} in all",
                param="max_tokens",
            )

    def add(self, request: Request) -> None:
        """Raises `RequestRefused` or `QueueFull`; the request is then none of the scheduler's business."""
        self.check(request)
        if request.request_id in self._requests:
            raise RequestRefused(f"request {request.request_id!r} is already here", param="request_id")
        if len(self._requests) >= self._max_num_seqs + self._max_waiting:
            raise QueueFull(f"{len(self._requests)} requests are unfinished, and no more are taken")
        self._requests[request.request_id] = request
        insort(self.waiting, request, key=scheduling_key)
        if request.deadline < math.inf:
            if len(self._deadlines) > 2 * (self._max_num_seqs + self._max_waiting):  # most of them have ended
                self._deadlines = sorted((r.deadline, r.request_id) for r in self._requests.values())
            else:
                heappush(self._deadlines, (request.deadline, request.request_id))

    def schedule(self) -> tuple[ScheduledRequest, ...]:
        """Spends one token budget, class by class: in each on what runs, then on what waits, the most urgent first."""
        budget = TokenBudget(self.max_num_batched_tokens)
        plan: list[ScheduledRequest] = []
        num_seen = 0
        while budget.tokens:
            request = self.running[num_seen] if num_seen < len(self.running) else None
            if self.waiting and (request is None or self.waiting[0].priority < request.priority):
                request = self.waiting[0]
                if not budget.admits(request) or not self._admit(request):
                    break  # nobody overtakes: what waits for blocks would wait for ever
            elif request is None:
                break
            num_seen += 1
            num_tokens = budget.share(request)
            if not num_tokens:
                continue
            if not self._grow(request, num_tokens):
                break  # it was last in line, and gave way itself
            plan.append(ScheduledRequest(request, request.num_computed_tokens, num_tokens))
            budget.spend(request, num_tokens)
        return tuple(plan)

    def advance(self, plan: Sequence[ScheduledRequest], computed: Sequence[RunnerOutput]) -> list[StepOutput]:
        """Takes in what a step computed. A request that is still short of its last token has no output."""
        outputs: list[StepOutput] = []
        self.counters.step_tokens.add(sum(scheduled.num_tokens for scheduled in plan))
        for scheduled, result in zip(plan, computed, strict=True):
            request = scheduled.request
            caught_up = scheduled.catches_up
            request.num_computed_tokens = scheduled.end - len(scheduled.drafts)
            self._publish(request, scheduled.start)
            if request.pooling:
                self._pool_hidden(request, result.hidden_sum)
            request.prompt_logprobs += result.prompt_logprobs
            if caught_up:
                outputs.append(self._accept(scheduled, result))
        return outputs

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> StepOutput | None:
        """Ends a request between two steps and takes its blocks back. None if it is unknown or has ended already."""
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, reason)

    def stop_early(self, request: Request, num_wanted: int) -> StepOutput | None:
        """Ends, between two steps, a request of whose tokens the first so many are an answer. None if it had ended."""
        self.counters.unwanted_tokens += request.num_output_tokens - num_wanted
        return self.abort(request.request_id, FinishReason.STOP)

    def expire(self, now: float) -> list[StepOutput]:
        """Ends, between two steps, every request whose deadline has come. `now`: seconds since the epoch."""
        outputs = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None and request.deadline == deadline:
                outputs.append(self._finish(request, FinishReason.DEADLINE))
        return outputs

    def fail_all(self) -> None:
        """After an error: every request has failed. Blocks stay as they are, since nothing here is to be trusted."""
        for request in self._requests.values():
            request.status = RequestStatus.FINISHED
            request.finish_reason = FinishReason.ERROR
            self.counters.finished[FinishReason.ERROR] += 1
        self.running, self.waiting, self._requests, self._deadlines = [], [], {}, []

    def reserve(self, request: Request, num_tokens: int) -> int:
        """Makes room for tokens behind a running request's last: so many, or as many as there are blocks to spare for.

        There stays a free block for each who runs, so that nobody is preempted for a guess. Returns how many there is
        room for.
        """
        num_spare = max(0, self.pool.num_free - len(self.running))
        num_tokens = min(
            num_tokens, (len(request.block_table) + num_spare) * self.pool.block_size - len(request.token_ids)
        )
        num_new = self._num_blocks(len(request.token_ids) + num_tokens) - len(request.block_table)
        request.block_table += self.pool.allocate(max(0, num_new), background=request.is_background) or []
        return num_tokens

    # -- blocks ------------------------------------------------------------------------------------------------

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Room for `num_tokens` more, preempting from the end of the line. False if that end was `request`."""
        num_new = self._num_blocks(request.num_computed_tokens + num_tokens) - len(request.block_table)
        while (blocks := self.pool.allocate(max(num_new, 0), background=request.is_background)) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.block_table += blocks
        return True

    def _admit(self, request: Request) -> bool:
        """Starts a request from the longest cached prefix, with room for all its known tokens; False if there is none.

        Room for all, not for the first chunk: two long prompts would otherwise preempt each other halfway. Who runs
        in a less urgent class gives way, from the end of the line, as long as that is needed.
        At least the last token is always computed, even if it is cached: the next one comes from its hidden state.
        """
        while (blocks := self._place(request)) is None:
            if not self.running or self.running[-1].priority <= request.priority:
                return False
            self._preempt(self.running[-1])
        self._start(request, *blocks)
        return True

    def _place(self, request: Request) -> tuple[list[int], int] | None:
        """The blocks that a request starts with, and how many of them are cached; None if there is no room for it."""
        if len(self.running) >= self._max_num_seqs:
            return None
        hashes = self._full_hashes(request)
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
        """Back to the line, to be computed again: mostly from its own blocks, if they are still cached by then."""
        self.running.remove(request)
        insort(self.waiting, request, key=scheduling_key)
        self.pool.free(request.block_table)
        request.status = RequestStatus.WAITING
        request.block_table = []
        request.num_computed_tokens = 0
        request.hidden_sum = []
        request.prompt_logprobs = []
        request.num_preemptions += 1
        self.counters.preemptions += 1

    def _reads_cache(self, request: Request) -> bool:
        return self._enable_prefix_caching and not request.needs_all_hidden

    def _full_hashes(self, request: Request) -> list[bytes]:
        """Of the blocks that may come from the cache."""
        if not self._reads_cache(request):
            return []
        num_full = (len(request.token_ids) - 1) // self.pool.block_size
        self._hash_blocks(request, num_full)
        return request.block_hashes[:num_full]

    def _publish(self, request: Request, start: int) -> None:
        """Makes the blocks that were filled since token `start` findable."""
        if not self._enable_prefix_caching:
            return
        num_full = request.num_computed_tokens // self.pool.block_size
        self._hash_blocks(request, num_full)
        for i in range(start // self.pool.block_size, num_full):
            parent = request.block_hashes[i - 1] if i else ROOT_HASH
            content = CachedBlock(
                request.block_hashes[i], parent, *self._block_key(request, i), session_id=request.session_id
            )
            self.pool.cache_block(request.block_table[i], content)

    def _hash_blocks(self, request: Request, count: int) -> None:
        hashes = request.block_hashes
        for i in range(len(hashes), count):
            hashes.append(hash_block(hashes[-1] if i else ROOT_HASH, *self._block_key(request, i)))

    def _block_key(self, request: Request, i: int) -> tuple[tuple[int, ...], str]:
        """What a block's own hash covers: its tokens, and the salt in the first."""
        size = self.pool.block_size
        return tuple(request.token_ids[i * size : (i + 1) * size]), "" if i else request.cache_salt

    # -- results -----------------------------------------------------------------------------------------------

    def _pool_hidden(self, request: Request, hidden_sum: Sequence[float]) -> None:
        so_far = request.hidden_sum or [0.0] * len(hidden_sum)
        request.hidden_sum = [a + b for a, b in zip(so_far, hidden_sum, strict=True)]

    def _accept(self, scheduled: ScheduledRequest, result: RunnerOutput) -> StepOutput:
        """What the model says after a request's last token: new tokens, its embedding, perhaps its end."""
        request = scheduled.request
        if not request.timing.first_token:
            request.timing.first_token = time.time()
            if not request.prompt_tally.is_counted:
                request.prompt_tally.is_counted = True
                self.counters.prompt_tokens += request.num_prompt_tokens
                self.counters.cached_prompt_tokens += request.num_cached_tokens
        if result.error is not None:
            return self._finish(request, FinishReason.ERROR, error=result.error)
        if request.pooling:
            mean = tuple(value / request.num_prompt_tokens for value in request.hidden_sum)
            return self._finish(request, FinishReason.STOP, embedding=mean)
        reports_prompt = request.sampling.prompt_logprobs is not None and not request.num_output_tokens
        prompt_logprobs = tuple(request.prompt_logprobs) if reports_prompt else None
        reason = None if request.sampling.max_tokens else FinishReason.LENGTH
        num_new = 0
        num_sure = min(len(result.token_ids), self._count_accepted(scheduled, result) + 1)
        while reason is None and num_new < num_sure:
            token_id = result.token_ids[num_new]
            request.append(token_id)
            reason = self._reason_to_finish(request, token_id)
            num_new += 1
        self.counters.generation_tokens += num_new
        if num_new > 1:  # all but the last were drafts, and computed with the rest
            request.num_computed_tokens += num_new - 1
            self._publish(request, scheduled.start)
        new: _New = {
            "new_token_ids": result.token_ids[:num_new],
            "logprobs": result.logprobs[:num_new],
            "prompt_logprobs": prompt_logprobs,
        }
        return self._finish(request, reason, **new) if reason else self._output(request, **new)

    def _count_accepted(self, scheduled: ScheduledRequest, result: RunnerOutput) -> int:
        if not scheduled.drafts:
            return 0
        num_confirmed, accepted = count_accepted(scheduled.drafts, result.token_ids), self.counters.accepted_tokens
        self.counters.drafts += 1
        self.counters.draft_tokens += len(scheduled.drafts)
        accepted += [0] * (len(scheduled.drafts) - len(accepted))
        for place in range(num_confirmed):
            accepted[place] += 1
        return num_confirmed

    @staticmethod
    def _reason_to_finish(request: Request, token_id: int) -> FinishReason | None:
        sampling = request.sampling
        if token_id in sampling.stop_token_ids and request.num_output_tokens >= sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if request.num_output_tokens >= sampling.max_tokens else None

    def _finish(self, request: Request, reason: FinishReason, **new: Unpack[_New]) -> StepOutput:
        (self.running if request.status is RequestStatus.RUNNING else self.waiting).remove(request)
        del self._requests[request.request_id]
        self.pool.free(request.block_table)
        request.block_table = []
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.timing.finished = time.time()
        self.counters.finished[reason] += 1
        return self._output(request, **new)

    @staticmethod
    def _output(request: Request, **new: Unpack[_New]) -> StepOutput:
        return StepOutput(
            request_id=request.request_id,
            finish_reason=request.finish_reason,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            timing=request.timing if request.finish_reason else None,
            **new,
        )
