"""Adds drafts to a plan, and learns from how many of them were accepted.

    plan     = scheduler.schedule()     one token for each request
    plan     = speculator.extend(plan)  drafts after it, within the step's remaining tokens and spare blocks
    computed = runner.run(plan)         the token at each position, sampled as it would be without drafts
    outputs  = scheduler.advance(...)   takes the tokens up to the first that differs from its draft

A draft is accepted if it is exactly the token that is sampled at its position, by argmax or with noise that depends on
the position only. So drafts never change an answer. Requests with a grammar get none, because the masks for later
positions are not known yet. A step that computes a prompt gets none either, because a first token waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from backend.engine.plan import RunnerOutput, ScheduledRequest, count_accepted
from backend.engine.request import Request
from backend.engine.scheduler import Scheduler
from backend.engine.spare_blocks import reserve_blocks
from backend.engine.speculation.base import Drafter, DraftRequest
from backend.engine.speculation.draft_length import AdaptiveDraftLength


class Speculator:
    """Extends each step's plan with drafts, as many as pay off. Without a drafter, plans stay as they are."""

    def __init__(
        self,
        scheduler: Scheduler,
        drafter: Drafter | None = None,
        max_draft_tokens: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scheduler = scheduler
        self._drafter = drafter
        self._max_draft_tokens = max_draft_tokens
        self._draft_length = AdaptiveDraftLength()
        self._clock = clock
        self._step_began: float | None = None  # None if the running step's cost is not comparable with others'

    def extend(self, plan: tuple[ScheduledRequest, ...]) -> tuple[ScheduledRequest, ...]:
        """The plan with drafts. Starts the clock of the step."""
        self._step_began = None
        if self._drafter is None or not all(map(_is_decode, plan)):
            return plan
        self._step_began = self._clock()
        if not (wanted := self._draft_requests(plan)):
            return plan
        drafts = self._drafter.draft(wanted)
        by_request = {each.request: drafted for each, drafted in zip(wanted, drafts, strict=True) if drafted}
        return tuple(_with_drafts(scheduled, by_request.get(scheduled.request, ())) for scheduled in plan)

    def learn(self, plan: Sequence[ScheduledRequest], computed: Sequence[RunnerOutput]) -> None:
        """After a step: records what it cost and which drafts were accepted."""
        if self._step_began is None:
            return
        seconds = self._clock() - self._step_began
        self._draft_length.record_step(len(plan), sum(len(s.drafts) for s in plan), seconds)
        for scheduled, result in zip(plan, computed, strict=True):
            if drafts := scheduled.drafts:
                num_accepted = count_accepted(drafts, result.token_ids)
                self._draft_length.record_drafts(scheduled.request, len(drafts), num_accepted)

    def set_num_threads(self, num_threads: int) -> None:
        """Sets how many threads the drafter uses. Only between two steps."""
        if self._drafter:
            self._drafter.set_num_threads(num_threads)

    def _draft_requests(self, plan: Sequence[ScheduledRequest]) -> list[DraftRequest]:
        remaining = self._scheduler.max_num_batched_tokens - len(plan)
        wanted = []
        requests = [scheduled.request for scheduled in plan]
        numbers = self._draft_length.num_drafts(requests, self._max_draft_tokens)
        for request, num_tokens in zip(requests, numbers, strict=True):
            num_tokens = min(num_tokens, remaining, _max_drafts(request))
            if num_tokens > 0 and (num_tokens := reserve_blocks(self._scheduler, request, num_tokens)) > 0:
                wanted.append(DraftRequest(request, num_tokens))
                remaining -= num_tokens
        return wanted


def _is_decode(scheduled: ScheduledRequest) -> bool:
    return scheduled.catches_up and scheduled.num_tokens == 1


def _max_drafts(request: Request) -> int:
    """How many tokens may be drafted before `max_tokens`: at least one more token is sampled after the drafts."""
    if request.grammar or not request.num_output_tokens:
        return 0
    return request.sampling.max_tokens - request.num_output_tokens - 1


def _with_drafts(scheduled: ScheduledRequest, drafts: tuple[int, ...]) -> ScheduledRequest:
    return replace(scheduled, num_tokens=scheduled.num_tokens + len(drafts), drafts=drafts) if drafts else scheduled
