"""What was tried for one call, in order. Written by the router, read by the receipt and the spans."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gateway.deployments.fleet import DeploymentState, SentCall
from gateway.types import Attempt

# Outcomes that no fault stands for.
CLIENT_GONE = "client_gone"
HEDGE_LOST = "hedge_lost"
GIVEN_UP = "given_up"
TOO_SLOW = "too_slow"
OUT_OF_TIME = "out_of_time"


class AttemptLog:
    """One call's."""

    def __init__(
        self,
        new_span_id: Callable[[], int],
        headers: Callable[[int], Mapping[str, str]],
        task: asyncio.Task[Any] | None = None,
        open_call: Callable[[DeploymentState], None] = lambda deployment: None,
        *,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.task = task  # whose call it is, for who has it at hand
        self.done: list[Attempt] = []
        self.last_deployment: DeploymentState | None = None  # the last one that took the call and may have worked on it
        self.outcome_if_cancelled = CLIENT_GONE  # the outcome of an attempt that is cancelled now
        self.lost_hedges: list[DeploymentState] = []  # of races: they may have worked on it, too
        self.last_error_text = ""  # of the last server that failed, where it has said something
        self.new_span_id = new_span_id
        self.now_ns = now_ns  # the clock of the call's marks
        self.headers = headers  # of an attempt, by its span id
        self._open_call = open_call  # notes it in the books

    def begin(self, deployment: DeploymentState) -> None:
        """Before anything is sent to it. Raises `LedgerUnavailable` where it must not be asked."""
        self._open_call(deployment)
        self.last_deployment = deployment

    def add(self, sent: SentCall, outcome: str, started_ns: int, span_id: int, status: int | None) -> None:
        if outcome == HEDGE_LOST:
            self.lost_hedges.append(sent.deployment)
        self.done.append(
            Attempt(
                deployment=sent.deployment.name,
                outcome=outcome,
                started_ns=started_ns,
                ended_ns=self.now_ns(),
                span_id=span_id,
                status=status,
                predicted_cached_tokens=sent.predicted_cached_tokens,
            )
        )

    def has_outcome(self, outcome: str) -> bool:
        """Whether one of them has ended so."""
        return any(attempt.outcome == outcome for attempt in self.done)

    def conclude(self, outcome: str) -> None:
        """The attempt that had answered is over now, in this way. It is the last one, or over already."""
        last = self.done[-1]
        if last.outcome == "ok":
            self.done[-1] = Attempt(
                last.deployment, outcome, last.started_ns, self.now_ns(), last.span_id, last.status,
                last.predicted_cached_tokens, last.continues,
            )  # fmt: skip

    def mark_continues(self) -> None:
        """The last one goes on with the answer of one before."""
        self.done[-1] = msgspec.structs.replace(self.done[-1], continues=True)

    def mark_hedge_lost(self, deployment: DeploymentState) -> None:
        """It answered in the same moment as another one."""
        self.lost_hedges.append(deployment)
        self.done = [
            msgspec.structs.replace(attempt, outcome=HEDGE_LOST) if attempt.deployment == deployment.name else attempt
            for attempt in self.done
        ]

    def move_winner_last(self, deployment: str) -> None:
        """After a race: `conclude` speaks of the last one."""
        self.done.sort(key=lambda attempt: attempt.deployment == deployment and attempt.outcome == "ok")

    def as_error_details(self) -> list[dict[str, object]]:
        """The attempts as a refused caller is told of them."""
        return [{"deployment": a.deployment, "outcome": a.outcome, "status": a.status} for a in self.done]
