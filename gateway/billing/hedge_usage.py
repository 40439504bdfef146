"""Usage of cancelled hedge attempts: recorded in the call's receipt with the attempts, and never billed.

A hedge attempt is cancelled as soon as the other attempt has won. Some deployments keep a usage record of each
request. The gateway fetches the cancelled deployment's record while it relays the winner's answer. For a non-streaming
answer the record usually arrives after the receipt is written. The receipt then contains an estimate: the whole prompt,
since the deployment may have computed it. The record that arrives later becomes an `unbilled` row of the ledger
(`gateway.billing.recovery`).
"""

from __future__ import annotations

import asyncio

import msgspec

from gateway.billing.metering import Meter
from gateway.deployments.state import DeploymentState
from gateway.routing.attempt_log import HEDGE_LOST
from gateway.types import Attempt, Call, Usage


class HedgeUsage:
    """Fetches and reads the usage records of one call's cancelled hedge attempts. Not thread-safe."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._records: dict[str, asyncio.Task[bytes | None]] = {}

    def fetch_record(self, deployment: DeploymentState, request_id: str) -> None:
        """Start to fetch the deployment's usage record of the request with the id `request_id`."""
        if deployment.provider.has_usage_records:
            fetching = deployment.provider.recorded_usage(request_id)  # takes a bounded time, and never raises
            self._records[deployment.name] = asyncio.create_task(fetching, name="record of a cancelled hedge")

    def with_usage(self, attempts: list[Attempt]) -> list[Attempt]:
        """Return the attempts with the usage of the cancelled ones filled in. Stops fetching records."""
        attempts = [
            msgspec.structs.replace(attempt, unbilled=self._usage_at(attempt.deployment))
            if attempt.outcome == HEDGE_LOST
            else attempt
            for attempt in attempts
        ]
        for fetching in self._records.values():
            fetching.cancel()
        return attempts

    def _usage_at(self, deployment: str) -> Usage:
        fetching = self._records.get(deployment)
        if fetching is not None and fetching.done() and (record := fetching.result()) is not None:
            meter = Meter(self._call)
            meter.read_record(record)
            if meter.usage.exact:
                return meter.usage
        # An estimate: the deployment may have computed all or a part of the prompt before the attempt was cancelled.
        return Usage(input_uncached=self._call.input_tokens_estimate)
