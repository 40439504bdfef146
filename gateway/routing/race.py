"""A hedge as it happens: two servers asked for one answer.

The second one is asked when the first is late. However the race ends, whoever has not won is cancelled before `run`
returns, and the attempts say who lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.deployments.fleet import SlotPermit
from gateway.policy import Floor
from gateway.routing.asking import AttemptRunner
from gateway.routing.attempts import CLIENT_GONE, HEDGE_LOST, AttemptLog
from gateway.routing.base import Candidate
from gateway.routing.upstream import Upstream
from gateway.types import Call

Second = Callable[[], tuple[Candidate, SlotPermit] | None]
"""Chooses the second server and takes a place there, or None where nobody is to be asked."""


class HedgedAttempt:
    """One call's. Its `run` is called once."""

    def __init__(
        self, runner: AttemptRunner, call: Call, deadline: float, attempts: AttemptLog, floor: Floor | None
    ) -> None:
        self._runner = runner
        self._call = call
        self._deadline = deadline
        self._attempts = attempts
        self._floor = floor
        self._tasks: list[asyncio.Task[Upstream | None]] = []

    async def run(
        self, first: Candidate, late_after_seconds: float, choose_second: Second, permit: SlotPermit
    ) -> Upstream | None:
        """The first answer; None where neither gave one. `permit` is at the winner's server then."""
        won: Upstream | None = None
        second: tuple[Candidate, SlotPermit] | None = None
        try:
            self._start(first)
            await asyncio.wait(self._tasks, timeout=late_after_seconds)
            if not self._tasks[0].done() and (second := choose_second()) is not None:
                self._start(second[0])
            won = await self._first_result()
            if won is not None and second is not None and won.deployment is second[0].deployment:
                permit.swap(second[1])
            return won
        finally:
            await self._end_others(won)
            if second is not None:
                second[1].release()

    def _start(self, candidate: Candidate) -> None:
        asking = self._runner.ask(self._call, candidate, self._deadline, self._attempts, self._floor, racing=True)
        self._tasks.append(asyncio.create_task(asking))

    async def _first_result(self) -> Upstream | None:
        pending = set(self._tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (upstream := task.result()) is not None:
                    return upstream
        return None

    async def _end_others(self, won: Upstream | None) -> None:
        attempts = self._attempts
        attempts.cancelled_as = HEDGE_LOST if won is not None else CLIENT_GONE
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        attempts.cancelled_as = CLIENT_GONE
        for task in self._tasks:
            if not task.cancelled() and task.exception() is None:
                other = task.result()
                if other is not None and other is not won:  # both answered in the same moment
                    attempts.lose(other.deployment)
                    await other.aclose()
        if won is not None:
            attempts.asked = won.deployment
            attempts.winner_last(won.deployment.name)
