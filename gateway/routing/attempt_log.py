"""The attempts of one call, in order. The router writes the log; receipts, spans and error responses read it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gateway.core.errors import UpstreamRefused
from gateway.core.kv_transfer import PREFILLED
from gateway.deployments.sent_call import SentCall
from gateway.deployments.state import DeploymentState
from gateway.providers.base import Fault, ProviderFailure
from gateway.providers.request_progress import RequestProgress
from gateway.types import Attempt, Usage

# Outcomes that are not a `Fault` of the deployment.
CLIENT_GONE = "client_gone"
HEDGE_LOST = "hedge_lost"
GIVEN_UP = "given_up"  # a bug in the gateway ended the attempt
TOO_SLOW = "too_slow"  # the stream began more slowly than the class's floor
OUT_OF_TIME = "out_of_time"  # the client's or the call's own time was over first
NOT_SENT = "not_sent"  # cancelled, or out of time, before a byte of the request was sent


class OpenError(msgspec.Struct, frozen=True):
    """An error answer. Whether the deployment or the request is at fault is not known yet."""

    deployment: DeploymentState
    sent_at: float  # event-loop seconds
    was_probe: bool  # the request probed the half-open circuit breaker
    may_be_request: bool  # False for statuses that say nothing about the request
    refusal: UpstreamRefused  # the error as the client gets it if the request is at fault


class AttemptLog:
    """One call's attempts, and what the router and the call's end need to know about them."""

    def __init__(
        self,
        new_span_id: Callable[[], int],
        headers: Callable[[int], Mapping[str, str]],
        task: asyncio.Task[Any] | None = None,
        open_call: Callable[[DeploymentState], None] = lambda deployment: None,
        *,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`headers` makes an attempt's request headers from its span id.

        `open_call` records in the ledger that a deployment is about to receive the call.
        """
        self.task = task  # the call's task, which wait bounds cancel
        # Kept, since Python 3.11 makes a system call whenever it is asked for the running loop.
        self.loop = asyncio.get_running_loop() if task is None else task.get_loop()
        self.done: list[Attempt] = []
        self.last_deployment: DeploymentState | None = (
            None  # the last one that may have computed something for the call
        )
        self.newest: RequestProgress | None = None  # the attempt that was begun last, until its outcome is recorded
        self.outcome_if_cancelled = CLIENT_GONE  # recorded if the running attempt is cancelled now
        self.lost_hedges: list[DeploymentState] = []  # of cancelled hedge attempts; they may have computed something
        self.last_error_text = ""  # the error message of the last deployment that failed; for the client only
        self.refusal: UpstreamRefused | None = None  # a deployment's own error, if the request may be at fault
        self.errors: list[OpenError] = []  # error answers that no evidence explains yet
        self.rejected_at: set[str] = set()  # deployments that must not be tried again for this call
        self.convicted_at: set[str] = set()  # deployments that answer other requests and failed at this one
        self.crashes = 0  # of deployments during attempts of this call
        self.prefills = 0  # attempts at prefill deployments, which cannot answer
        self.new_span_id = new_span_id
        self.now_ns = now_ns  # the clock of the call's phase timings
        self.headers = headers
        self._open_call = open_call

    def begin(self, deployment: DeploymentState) -> None:
        """Open the attempt in the ledger, before anything is sent.

        Raises `LedgerUnavailable`; then nothing may be sent.
        """
        self._open_call(deployment)
        self.last_deployment = deployment

    def add(self, sent: SentCall, outcome: str, started_ns: int, span_id: int, status: int | None) -> None:
        """Append an attempt that has its first chunk or has failed."""
        if outcome == HEDGE_LOST:
            self.lost_hedges.append(sent.deployment)
        self.done.append(
            Attempt(
                sent.deployment.name,
                outcome,
                started_ns,
                self.now_ns(),
                span_id,
                status,
                sent.predicted_cached_tokens,
                blocks_from=sent.blocks_from,
            )
        )

    def note_error(self, deployment: DeploymentState, failure: ProviderFailure) -> None:
        """Keep a deployment's own error message for the client."""
        message = failure.upstream_message
        self.last_error_text = f"{deployment.name} reported: {message}" if message else ""
        if failure.fault is not Fault.CUT:
            self.last_deployment = None

    @property
    def tries(self) -> int:
        """How many attempts could have answered the call."""
        return len(self.done) - self.prefills

    def mark_prefill(self, computed: Usage | None) -> None:
        """Mark the last attempt as one at a prefill deployment. `computed` is None if that did not compute the prompt.

        The deployment that answers counts the prompt, too, so it is billed once (`gateway.billing.prefilled_prompt`).
        """
        self.prefills += 1
        if computed is not None:
            self.done[-1] = msgspec.structs.replace(self.done[-1], outcome=PREFILLED, unbilled=computed)

    def has_outcome(self, outcome: str) -> bool:
        """Whether an attempt ended with this outcome."""
        return any(attempt.outcome == outcome for attempt in self.done)

    def conclude(self, outcome: str) -> None:
        """Set the final outcome of the attempt that answered, which is the last one. Later calls have no effect."""
        last = self.done[-1]
        if last.outcome == "ok":
            self.done[-1] = Attempt(
                last.deployment, outcome, last.started_ns, self.now_ns(), last.span_id, last.status,
                last.predicted_cached_tokens, last.continues, blocks_from=last.blocks_from,
            )  # fmt: skip

    def mark_continues(self, cut: int, received: Usage) -> None:
        """Mark the last attempt as one that resumes the cut stream of an earlier attempt.

        `cut` is that attempt's index. It is not billed; `received` is an estimate of its usage.
        """
        self.done[-1] = msgspec.structs.replace(self.done[-1], continues=True)
        self.done[cut] = msgspec.structs.replace(self.done[cut], unbilled=received)

    def mark_hedge_lost(self, deployment: DeploymentState) -> None:
        """Mark an attempt as a cancelled hedge although it answered: the other one answered in the same moment."""
        self.lost_hedges.append(deployment)
        self.done = [
            msgspec.structs.replace(attempt, outcome=HEDGE_LOST)
            if (attempt.deployment, attempt.outcome) == (deployment.name, "ok")
            else attempt
            for attempt in self.done
        ]

    def move_winner_last(self, deployment: str) -> None:
        """Put the winner of a hedge last, because `conclude` applies to the last attempt."""
        self.done.sort(key=lambda attempt: attempt.deployment == deployment and attempt.outcome == "ok")

    def as_error_details(self) -> list[dict[str, object]]:
        """The attempts as error responses list them, under `error.attempts`."""
        return [{"deployment": a.deployment, "outcome": a.outcome, "status": a.status} for a in self.done]
