"""What the losers of a race for an answer have done: nobody pays for it, and the receipt tells it with their attempts.

A loser is cancelled at once. While the winner's answer goes on, it is asked for its own record of the call, where it
keeps one. Where there is none when the receipt is written, as mostly for an answer that comes in one piece, the whole
prompt is the estimate, as it may have computed that; its record is then noted as a row of the ledger alone
(`gateway.billing.recovery`).
"""

from __future__ import annotations

import asyncio

import msgspec

from gateway.billing.metering import Meter
from gateway.deployments.fleet import DeploymentState
from gateway.routing.attempt_log import HEDGE_LOST
from gateway.types import Attempt, Call, Usage


class HedgeUsage:
    """Of one call."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._records: dict[str, asyncio.Task[bytes | None]] = {}

    def fetch_record(self, deployment: DeploymentState, request_id: str) -> None:
        """`request_id` is that under which it got the call."""
        if deployment.provider.has_usage_records:
            asking = deployment.provider.recorded_usage(request_id)  # which takes a bounded time, and never raises
            self._records[deployment.name] = asyncio.create_task(asking, name="loser's record")

    def with_usage(self, attempts: list[Attempt]) -> list[Attempt]:
        """The attempts for the receipt, those of losers with what is known of their work. Nobody is asked any more."""
        attempts = [
            msgspec.structs.replace(attempt, unbilled=self._usage_at(attempt.deployment))
            if attempt.outcome == HEDGE_LOST
            else attempt
            for attempt in attempts
        ]
        for asking in self._records.values():
            asking.cancel()
        return attempts

    def _usage_at(self, deployment: str) -> Usage:
        asking = self._records.get(deployment)
        if asking is not None and asking.done() and (record := asking.result()) is not None:
            meter = Meter(self._call)
            meter.read_record(record)
            if meter.usage.exact:
                return meter.usage
        return Usage(input_uncached=self._call.prompt_tokens_estimate)
