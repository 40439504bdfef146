"""Where calls are entered: each server before it is asked, and the receipt at the end.

A call that was opened and has no receipt was lost with its gateway: the next start bills it (`billing.recovery`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gateway.billing.ledger import Ledger, OpenCall
from gateway.core.ids import new_event_id
from gateway.core.times import rfc3339
from gateway.deployments.fleet import DeploymentState
from gateway.types import Call, PhaseTimings, Receipt


class CallLog(Protocol):
    """Where receipts go: into the ledger; or, of a line of a batch, with its result (`gateway.batches.inside`)."""

    def check(self) -> None:
        """Raise `LedgerUnavailable` where the next receipt could not be written."""

    def open_call(self, opened: OpenCall) -> None:
        """A server is about to be asked. Raise `LedgerUnavailable` where that could not be billed."""

    def append(self, receipt: Receipt) -> None:
        """The call is over. Raise `LedgerUnavailable` where that could not be written."""

    def abandon(self, call_id: str) -> None:
        """There will be no receipt: whatever was done for the call was in vain."""


class LedgerCallLog:
    """The ledger. What was done in vain for a call, as by servers that failed, goes to `in_vain`: it is noted, too."""

    def __init__(self, ledger: Ledger, on_unbilled: Callable[[OpenCall], None]) -> None:
        self._ledger = ledger
        self._on_unbilled = on_unbilled
        self.check = ledger.check
        self.open_call = ledger.open_call

    def append(self, receipt: Receipt) -> None:
        self._ledger.append(receipt)
        self.abandon(receipt.call_id)  # all that is still open of it

    def abandon(self, call_id: str) -> None:
        for opened in self._ledger.open_attempts(call_id):
            self._on_unbilled(opened)


class CallOpener:
    """Notes in the books, for one call, each server that is about to be asked."""

    __slots__ = ("_call", "_call_log", "_timings", "opened")

    def __init__(self, call_log: CallLog, call: Call, timings: PhaseTimings) -> None:
        self._call_log = call_log
        self._call = call
        self._timings = timings
        self.opened: list[OpenCall] = []

    @property
    def request_id(self) -> str:
        """Of the attempt that was opened last: by it the server can be asked afterwards what it did."""
        return self.opened[-1].request_id

    def request_id_at(self, deployment: DeploymentState) -> str:
        """Of the last attempt at a server that was asked."""
        return next(each.request_id for each in reversed(self.opened) if each.deployment == deployment.name)

    def __call__(self, deployment: DeploymentState) -> None:
        opened = make_open_call(self._call, self._timings, deployment, len(self.opened) + 1)
        self._call_log.open_call(opened)
        self.opened.append(opened)


def make_open_call(call: Call, timings: PhaseTimings, deployment: DeploymentState, attempt: int) -> OpenCall:
    """The row that says so. `attempt` counts from 1."""
    return OpenCall(  # in the order of the fields: names cost more than the row
        new_event_id(),
        call.id,
        call.principal.tenant.name,
        call.principal.key_id,
        call.end_user,
        call.operation,
        call.asked_model,
        deployment.config.name,
        call.class_name,
        call.service_tier,
        rfc3339(timings.started_ns),
        call.prompt_tokens_estimate,
        call.policy.hash,
        f"{call.trace.trace_id:032x}",
        attempt,
    )
