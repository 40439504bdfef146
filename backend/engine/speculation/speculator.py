"""Adds guesses to a plan, and learns from what became of them.

    plan     = scheduler.schedule()     everybody's next token
    plan     = speculator.extend(plan)  and guesses behind it, from what the step has left of tokens and blocks
    computed = runner.run(plan)         the token at each place, drawn as it would have been drawn there anyway
    ...        scheduler.advance        takes those up to the first that is not the guess

A guess is right if it is the very token that is drawn at its place: greedy, or by noise that depends on the place
alone. So nothing of an answer depends on guesses. Requests that follow a grammar get none: their masks would be needed
for places that the walk has not come to. Nor are there any in a step that reads a prompt, which somebody's first token
waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from backend.engine.plan import RunnerOutput, ScheduledRequest, count_accepted
from backend.engine.request import Request
from backend.engine.scheduler import Scheduler
from backend.engine.speculation.base import Drafter, Wanted
from backend.engine.speculation.draft_length import AdaptiveDraftLength


class Speculator:
    def __init__(
        self,
        scheduler: Scheduler,
        drafter: Drafter | None = None,
        max_draft_tokens: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Without a drafter plans stay as they are."""
        self._scheduler = scheduler
        self._drafter = drafter
        self._max_draft_tokens = max_draft_tokens
        self._payoff = AdaptiveDraftLength()
        self._clock = clock
        self._began: float | None = None  # the step that is under way, if its cost can be compared with others

    def extend(self, plan: tuple[ScheduledRequest, ...]) -> tuple[ScheduledRequest, ...]:
        self._began = None
        if self._drafter is None or not all(map(_is_output, plan)):
            return plan
        self._began = self._clock()
        if not (wanted := self._wanted(plan)):
            return plan
        drafts = self._drafter.draft(wanted)
        drafted = {each.request: guess for each, guess in zip(wanted, drafts, strict=True) if guess}
        return tuple(_with_drafts(scheduled, drafted.get(scheduled.request, ())) for scheduled in plan)

    def learn(self, plan: Sequence[ScheduledRequest], computed: Sequence[RunnerOutput]) -> None:
        """After a step: what came true, and what it cost."""
        if self._began is None:
            return
        self._payoff.record_step(len(plan), sum(len(s.drafts) for s in plan), self._clock() - self._began)
        for scheduled, result in zip(plan, computed, strict=True):
            if drafts := scheduled.drafts:
                self._payoff.record_drafts(scheduled.request, len(drafts), count_accepted(drafts, result.token_ids))

    def _wanted(self, plan: Sequence[ScheduledRequest]) -> list[Wanted]:
        left = self._scheduler.max_num_batched_tokens - len(plan)
        wanted = []
        requests = [scheduled.request for scheduled in plan]
        numbers = self._payoff.num_drafts(requests, self._max_draft_tokens)
        for request, num_tokens in zip(requests, numbers, strict=True):
            num_tokens = min(num_tokens, left, _room(request))
            if num_tokens > 0 and (num_tokens := self._scheduler.reserve(request, num_tokens)) > 0:
                wanted.append(Wanted(request, num_tokens))
                left -= num_tokens
        return wanted


def _is_output(scheduled: ScheduledRequest) -> bool:
    return scheduled.catches_up and scheduled.num_tokens == 1


def _room(request: Request) -> int:
    """How many tokens may be guessed: those behind them are sampled, and there must be one."""
    if request.grammar or not request.num_output_tokens:
        return 0
    return request.sampling.max_tokens - request.num_output_tokens - 1


def _with_drafts(scheduled: ScheduledRequest, drafts: tuple[int, ...]) -> ScheduledRequest:
    return replace(scheduled, num_tokens=scheduled.num_tokens + len(drafts), drafts=drafts) if drafts else scheduled
