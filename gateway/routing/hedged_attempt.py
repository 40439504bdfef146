"""A hedged attempt: if the first deployment is late, a second one gets the call too, and the first answer wins.

However it ends, the attempt that did not win is cancelled before `run` returns, and the attempt log marks it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from gateway.deployments.slot_permit import SlotPermit
from gateway.policy import Floor
from gateway.routing.attempt_log import CLIENT_GONE, HEDGE_LOST, AttemptLog
from gateway.routing.base import Candidate
from gateway.routing.remote_prefill import RemotePrefill
from gateway.routing.upstream import Upstream
from gateway.types import Call

ChooseHedge = Callable[[], tuple[Candidate, SlotPermit] | None]
"""Chooses a second deployment and takes a slot there. None if no hedge is possible or the budget is spent."""


class HedgedAttempt:
    """Runs one hedged attempt. Call `run` once."""

    def __init__(
        self, remote_prefill: RemotePrefill, call: Call, deadline: float, attempts: AttemptLog, floor: Floor | None
    ) -> None:
        run = partial(remote_prefill.run_prepared, call)
        self._run = partial(run, deadline=deadline, attempts=attempts, floor=floor, in_own_task=True)
        self._attempts = attempts
        self._tasks: list[asyncio.Task[Upstream | None]] = []

    async def run(
        self,
        prepared: Candidate,
        first: Candidate,
        hedge_after_seconds: float,
        choose_hedge: ChooseHedge,
        permit: SlotPermit,
    ) -> Upstream | None:
        """The first answer; None if neither deployment gave one.

        `prepared` is `first`, perhaps with params to load the prompt. The second deployment computes it. `permit` then
        holds a slot at the winner's deployment.
        """
        winner: Upstream | None = None
        second: tuple[Candidate, SlotPermit] | None = None
        try:
            self._start(prepared, first)
            await asyncio.wait(self._tasks, timeout=hedge_after_seconds)
            if not self._tasks[0].done() and (second := choose_hedge()) is not None:
                self._start(second[0], second[0])
            winner = await self._first_result()
            if winner is not None and second is not None and winner.deployment is second[0].deployment:
                permit.swap(second[1])  # `permit` follows the winner; the other slot is released below
            return winner
        finally:
            await self._cancel_others(winner)
            if second is not None:
                second[1].release()

    def _start(self, prepared: Candidate, candidate: Candidate) -> None:
        self._tasks.append(asyncio.create_task(self._run(prepared, candidate)))

    async def _first_result(self) -> Upstream | None:
        pending = set(self._tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (upstream := task.result()) is not None:
                    return upstream
        return None

    async def _cancel_others(self, winner: Upstream | None) -> None:
        attempts = self._attempts
        attempts.outcome_if_cancelled = HEDGE_LOST if winner is not None else CLIENT_GONE
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        attempts.outcome_if_cancelled = CLIENT_GONE
        for task in self._tasks:
            if not task.cancelled() and task.exception() is None:
                other = task.result()
                if other is not None and other is not winner:  # both answered in the same iteration of the event loop
                    attempts.mark_hedge_lost(other.deployment)
                    await other.aclose()
        if winner is not None:
            attempts.last_deployment = winner.deployment
            attempts.move_winner_last(winner.deployment.name)
