"""The calls that a killed gateway has left open: each gets its receipt, by the record of the server that worked for it.

    opened, and no receipt --> ask the servers that had been asked, the last one first --> a receipt, `gateway_lost`

Nobody waits for this. Until its receipt is written a call stays open in the ledger, over further restarts too. What is
billed, by what can be learnt:

  the server's record of the call            its numbers, exact
  a server that keeps records, and has none  nothing, as an estimate: it was killed as well, or was never reached
  no record can be had                       the prompt's estimate, as an estimate
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from datetime import datetime

from gateway.errors import LedgerUnavailable
from gateway.fleet import Fleet, Server
from gateway.ledger import Ledger, Opened
from gateway.metering import Meter, bill_of, make_receipt
from gateway.policy import LatencyClass, Model, Policy, Tenant
from gateway.policy_file import PolicyHolder
from gateway.types import Attempt, Call, Marks, Operation, Outcome, Principal, Trace, Usage

ASK_SECONDS = 20.0  # for how long servers are asked that do not answer, or do not know yet
ASK_AGAIN_SECONDS = 1.0
ASKED_AT_ONCE = 16

log = logging.getLogger(__name__)


class Recovery:
    """Made when the ledger has been opened and nothing was written to it; `run` once, and `stop` before it closes."""

    def __init__(self, ledger: Ledger, fleet: Fleet, policies: PolicyHolder) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._policies = policies
        self._unfinished = ledger.unfinished()

    async def run(self) -> None:
        if self._unfinished:
            log.warning("%d calls were open when the gateway ended: they get their receipts now", len(self._unfinished))
        rest = iter(self._unfinished)
        await asyncio.gather(*[self._close_each(rest) for _ in range(min(ASKED_AT_ONCE, len(self._unfinished)))])

    async def _close_each(self, calls: Iterator[Sequence[Opened]]) -> None:
        for attempts in calls:
            with contextlib.suppress(LedgerUnavailable):  # which is in the log; the next start tries again
                await self._close(attempts)

    async def _close(self, attempts: Sequence[Opened]) -> None:
        last = attempts[-1]
        marks = Marks()
        marks.started_ns = _nanoseconds(last.started)
        policy = self._policies.current
        call = call_of(last, policy)
        usage, server = await self._ask(call, attempts)
        deployment = server.deployment if server is not None else None
        marks.end()
        bill = bill_of(call, usage, deployment, arrived_ns=marks.started_ns, service_tier=call.service_tier)
        outcome = Outcome.GATEWAY_LOST
        tried = [
            Attempt(each.deployment, outcome.value, marks.started_ns, marks.ended_ns, span_id=0) for each in attempts
        ]
        receipt = make_receipt(
            call, usage, outcome=outcome, marks=marks, bill=bill, attempts=tried, deployment=deployment
        )
        self._ledger.append(receipt)

    async def _ask(self, call: Call, attempts: Sequence[Opened]) -> tuple[Usage, Server | None]:
        """What was used, and whose work it was."""
        names = list(dict.fromkeys(opened.deployment for opened in reversed(attempts)))
        deadline = time.monotonic() + ASK_SECONDS
        while True:
            servers = {server.name: server for server in self._fleet}
            asked = [servers[name] for name in names if name in servers]
            for server in asked:
                if (record := await server.provider.usage_of(call.id)) is not None:
                    meter = Meter(call)
                    meter.watch_record(record)
                    return meter.usage, server
            if time.monotonic() >= deadline or not any(server.provider.keeps_records for server in asked):
                break
            await asyncio.sleep(ASK_AGAIN_SECONDS)
        for server in asked:
            if server.provider.keeps_records and await server.provider.healthy():
                return Usage(), server
        return Usage(input_uncached=call.prompt_tokens_estimate), asked[0] if asked else None


def call_of(opened: Opened, policy: Policy) -> Call:
    """As much of the call as its receipt is made of. What the policy does not know any more is taken by its name."""
    tenants = {tenant.name: tenant for tenant in policy.tenants}
    model = policy.models_by_name.get(opened.model_asked)
    return Call(
        id=opened.call_id,
        operation=Operation(opened.operation),
        principal=Principal(tenants.get(opened.tenant) or Tenant(name=opened.tenant), opened.key_id),
        policy=policy,
        asked_model=opened.model_asked,
        model=model or Model(name=opened.model_asked, deployments=(opened.deployment,)),
        class_name=opened.latency_class,
        latency_class=policy.classes.get(opened.latency_class) or LatencyClass(),
        stream=False,
        include_usage=False,
        max_output_tokens=None,
        deterministic=False,
        fields={},
        fingerprint=(),
        prompt_tokens_estimate=opened.prompt_tokens_estimate,
        cache_salt="",
        service_tier=opened.service_tier,
        end_user=opened.end_user,
        canonical_steps=(),
        class_rule=None,
        deadline=0.0,
        trace=Trace(int(opened.trace_id, 16), 0, sampled=False),
    )


def _nanoseconds(rfc3339: str) -> int:
    moment = datetime.fromisoformat(rfc3339)
    return int(moment.timestamp()) * 1_000_000_000 + moment.microsecond * 1000
