"""What a call is billed whose client leaves before the deployment has counted it.

The vendor's rule, or the policy, selects one of three means (`gateway.policy.disconnects`):

  record        ask the deployment for its usage record of the call
  read_to_end   `ReadToEnd` keeps the call going although no client receives the answer
  received      `count_early_end` counts the prompt and the text received so far

None of them bills 0 for a request that was sent. Crash recovery uses the same rules, with what the ledger has of the
call instead of the received text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.billing.metering import Meter
from gateway.billing.open_calls import CallOpener
from gateway.core.money import ATOM_DECIMALS
from gateway.deployments.state import DeploymentState
from gateway.endpoints.exchange import Exchange
from gateway.policy.disconnects import OnDisconnect
from gateway.routing.attempt_log import CLIENT_GONE, OUT_OF_TIME, AttemptLog
from gateway.types import Call


class ReadToEnd:
    """Decides how long one call continues after its client disconnected. Not thread-safe.

    It continues if the deployment that works for it would bill the whole answer anyway: to the end of the attempt in
    progress, at most for the policy's `max_time` and `max_cost`. No further attempt is made.
    """

    def __init__(self, call: Call, exchange: Exchange, attempts: AttemptLog, opener: CallOpener) -> None:
        self._call = call
        self._exchange = exchange
        self._attempts = attempts
        self._opener = opener
        self._followed: Callable[[], bool] = lambda: False
        self._bounds: OnDisconnect | None = None  # of the deployment; set while the call continues
        self._timer: asyncio.TimerHandle | None = None
        self._cost_at_first: int | None = None
        self._stopped = False

    def unless(self, followed: Callable[[], bool]) -> None:
        """Continue without bounds while `followed()` is true, because other calls wait for the same answer."""
        self._followed = followed

    def wanted(self) -> bool:
        """Whether the call is to continue. The exchange asks when its client has disconnected."""
        if self._followed():
            return True
        if self._stopped:
            return False
        if self._bounds is None:
            deployment = self._deployment_at_work()
            if deployment is None or deployment.config.bills_disconnect_by(stream=self._call.stream) != "read_to_end":
                return False
            self._bounds = deployment.config.on_disconnect
            self._timer = asyncio.get_running_loop().call_later(self._bounds.max_time, self._stop)
        return True

    def check_cost(self, cost: int | None) -> None:
        """Stop if a stream has cost more than `max_cost` since the client left. `cost` is in atoms."""
        if self._bounds is None or cost is None or self._followed():
            return
        if self._cost_at_first is None:
            self._cost_at_first = cost
        if cost - self._cost_at_first > int(self._bounds.max_cost.scaleb(ATOM_DECIMALS)):
            self._stop()

    def close(self) -> None:
        """Cancel the timer. Safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()

    def _deployment_at_work(self) -> DeploymentState | None:
        attempts = self._attempts
        at_work = len(self._opener.opened) - sum(attempt.outcome != "ok" for attempt in attempts.done)
        if at_work == 1 and attempts.newest is not None and attempts.newest.unsent:
            return None  # it still waits for a connection
        return attempts.last_deployment if at_work > 0 else None

    def _stop(self) -> None:
        self._stopped = True
        self._exchange.leave_if_gone()

    def before_attempt(self) -> None:
        """Make no further attempt for a client that has left. Raises `CancelledError`."""
        if not self._exchange.client_gone or self._followed():
            return
        if asyncio.current_task() is self._attempts.task:
            self._stopped = True
            raise asyncio.CancelledError
        self._stop()  # a hedge attempt has a task of its own


async def count_early_end(
    meter: Meter,
    call: Call,
    deployment: DeploymentState,
    request_id: str,
    *,
    merge: Callable[[bytes], bytes] = lambda record: record,
    was_working: bool,
    client_ended: bool,
    client_waits: bool = True,
) -> bool:
    """Fill the meter with what is known of a call that ended early. Returns whether the deployment's work is billed.

    `was_working` says whether the deployment was computing the answer at the end, and `client_ended` whether the client
    ended the call, by leaving or by a time limit of its own. `client_waits` says whether it waits for an error. If
    neither a record nor a count can be had, and the client ended the call, its prompt is billed: it was sent, and
    whether the deployment computed it cannot be known. `merge` extends a record to the whole answer, of which another
    deployment may have sent the beginning.
    """
    provider, config = deployment.provider, deployment.config
    if config.on_disconnect.bill in (None, "record"):
        record = await provider.recorded_usage(request_id, patient=not client_waits)
        if record is not None:
            meter.answered_by(config, deployment.token_rates)
            meter.read_record(merge(record))
            if meter.implausible is not None:
                meter.bill_prompt()
            return True
    if not client_ended:
        return False
    billed = False
    # A deployment that keeps records, answers, and has none of this call, never received it.
    if was_working and not (provider.has_usage_records and await provider.healthy()):
        meter.answered_by(config, deployment.token_rates)
        meter.bill_prompt()
        billed = True
    if meter.lacks_engine_counts:  # no client waits for this
        if (tokens := await provider.count_prompt_tokens(call)) is not None:
            meter.set_prompt_tokens(tokens)
        if (sample := meter.text_sample) and (tokens := await provider.count_text_tokens(sample)) is not None:
            meter.set_sample_tokens(tokens)
    return billed


def client_ended(exchange: Exchange, attempts: AttemptLog) -> bool:
    """Whether the client ended the call: it left, or a time limit that it set was over first."""
    return exchange.client_gone or attempts.has_outcome(OUT_OF_TIME)


def was_working(attempts: AttemptLog, *, answered: bool) -> bool:
    """Whether a deployment was working for the call at its end. `answered` says whether a first chunk had arrived."""
    return answered or attempts.has_outcome(CLIENT_GONE) or attempts.has_outcome(OUT_OF_TIME)
