"""Call logs: record each attempt before its request is sent, and the receipt when the call has ended.

If the ledger contains a call's attempts but no receipt, the gateway died during the call. When a gateway starts again,
it bills such calls (`gateway.billing.recovery`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import ClassVar, Protocol

import msgspec

from gateway.billing.ledger import Ledger, OpenCall
from gateway.billing.unbilled import UnbilledAttempt, unbilled_attempts
from gateway.core.errors import LedgerUnavailable
from gateway.core.ids import new_event_id
from gateway.core.times import rfc3339
from gateway.deployments.state import DeploymentState
from gateway.policy import REALTIME
from gateway.types import Call, PhaseTimings, Receipt


class CallLog(Protocol):
    """Interface of a call log, which records attempts and receipts.

    `LedgerCallLog` writes them to the ledger. The call log of a batch line stores them with the line's result.
    """

    writes_at_once: ClassVar[bool]  # whether `append` writes the receipt to this gateway's ledger

    def check(self) -> None:
        """Raise `LedgerUnavailable` if the next receipt could not be written."""

    def open_call(self, opened: OpenCall) -> None:
        """Record an attempt before its request is sent. If this raises `LedgerUnavailable`, do not send the request.

        A second row for the same attempt replaces the first. It says how much of the answer was received.
        """

    def append(self, receipt: Receipt) -> None:
        """Record the receipt of a call that has ended. Raises `LedgerUnavailable`."""

    def abandon(self, call_id: str) -> None:
        """Close a call without a receipt. The work of its open attempts is recorded as unbilled."""


class LedgerCallLog:
    """Call log that writes to the ledger. Calls `on_unbilled` with each attempt that a receipt leaves open."""

    writes_at_once: ClassVar[bool] = True

    def __init__(self, ledger: Ledger, on_unbilled: Callable[[UnbilledAttempt], None]) -> None:
        self._ledger = ledger
        self._on_unbilled = on_unbilled
        self.check = ledger.check
        self.open_call = ledger.open_call

    def append(self, receipt: Receipt) -> None:
        self._ledger.append(receipt)
        if still_open := self._ledger.open_attempts(receipt.call_id):  # those that the receipt did not close
            for attempt in unbilled_attempts(receipt, still_open):
                self._on_unbilled(attempt)

    def abandon(self, call_id: str) -> None:
        for opened in self._ledger.open_attempts(call_id):
            self._on_unbilled(UnbilledAttempt(opened))


class CallOpener:
    """Records the attempts of one call. The attempt log calls this object before each upstream request."""

    __slots__ = ("_call", "_call_log", "_timings", "before_attempt", "leased", "opened")

    def __init__(self, call_log: CallLog, call: Call, timings: PhaseTimings) -> None:
        self._call_log = call_log
        self._call = call
        self._timings = timings
        self.opened: list[OpenCall] = []
        self.before_attempt: Callable[[], None] | None = None  # may raise, so that no attempt is made
        self.leased = False  # whether the call was admitted from slices

    @property
    def request_id(self) -> str:
        """The request id of the newest attempt. The deployment's usage record has the same id."""
        return self.opened[-1].request_id

    def request_id_at(self, deployment: DeploymentState) -> str:
        """Return the request id of the newest attempt on a deployment. At least one attempt must have been made."""
        return next(each.request_id for each in reversed(self.opened) if each.deployment == deployment.name)

    def __call__(self, deployment: DeploymentState) -> None:
        """Record the next attempt. Raises `LedgerUnavailable`."""
        if self.before_attempt is not None:
            self.before_attempt()
        opened = make_open_call(self._call, self._timings, deployment, len(self.opened) + 1, leased=self.leased)
        self._call_log.open_call(opened)
        self.opened.append(opened)

    def note_output(self, output_tokens: int) -> None:
        """Record how much of the newest attempt's answer was received, for crash recovery.

        Ignores a full disk: the receipt has its space.
        """
        opened = self.opened[-1] = msgspec.structs.replace(
            self.opened[-1], event_id=new_event_id(), output_tokens_received=output_tokens
        )
        with contextlib.suppress(LedgerUnavailable):
            self._call_log.open_call(opened)


def make_open_call(
    call: Call, timings: PhaseTimings, deployment: DeploymentState, attempt: int, *, leased: bool = False
) -> OpenCall:
    """Make the ledger row of an attempt that is about to begin. `attempt` counts from 1."""
    return OpenCall(  # positional, since keyword arguments would cost more than the row itself
        new_event_id(),
        call.id,
        call.principal.tenant_name,
        call.principal.key_id,
        call.asked_model,
        deployment.name,
        rfc3339(timings.started_ns),
        call.input_tokens_estimate,
        call.policy.hash,
        "%032x" % call.trace.trace_id,  # noqa: UP031 (half of what a format specification takes)
        call.operation._value_,
        REALTIME if call.class_name == REALTIME else call.class_name,
        call.end_user,
        call.service_tier,
        attempt,
        expected_prompt_tokens=(
            deployment.token_rates.prompt_tokens(call.input_tokens_estimate) if call.media is None else 0
        ),
        leased=leased,
        route=call.route,
        model_routed=call.routed_model,
        stream=call.stream,
    )
