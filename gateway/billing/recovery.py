"""The calls that a killed gateway has left open: each gets its receipt, by the record of the server that worked for it.
And attempts that were made in vain, by this gateway or by one that was killed, are noted as what they were.

    opened, and no receipt --> ask the servers that had been asked, the last one first --> a receipt, `gateway_lost`

Nobody waits for this. Until its receipt is written a call stays open in the ledger, over further restarts too. What is
billed, by what can be learnt:

  the server's record of the call            its numbers, exact
  a server that keeps records, and has none  nothing, as an estimate: it was killed as well, or was never reached
  no record can be had                       the prompt's estimate, as an estimate; of an attempt in vain, nothing

What it cost is charged as soon as the receipt is durable: to what the killed gateway had reserved, where the storage
knows of that, else to the budgets of the period in which the call began.

And the newest calls that have their receipts are settled once more: a gateway settles behind the receipt, and may have
been killed in between. What is settled already stays as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from gateway.auth.authenticator import Authenticator
from gateway.billing.ledger import Ledger, OpenCall, UnbilledWork
from gateway.billing.metering import Meter
from gateway.billing.receipts import bill_of, make_receipt
from gateway.core.errors import LedgerUnavailable, StorageUnavailable
from gateway.core.ids import new_event_id
from gateway.core.money import atoms_to_nanos, text_to_atoms
from gateway.core.times import rfc3339, rfc3339_to_ns
from gateway.deployments.fleet import DeploymentState, Fleet
from gateway.limits.limiter import Limiter
from gateway.policy import LatencyClass, Model, Policy, Tenant
from gateway.policy.file import PolicyHolder
from gateway.types import Attempt, Call, Operation, Outcome, PhaseTimings, Principal, Receipt, Trace, Usage

ASK_SECONDS = 20.0  # for how long servers are asked that do not answer, or do not know yet
ASK_AGAIN_SECONDS = 1.0
MAX_CONCURRENT_LOOKUPS = 16
MAX_DUE = 10_000

log = logging.getLogger(__name__)


class Recovery:
    """Closes what nobody else closes: also the attempts in vain of calls that ended well (`add`)."""

    def __init__(
        self,
        ledger: Ledger,
        fleet: Fleet,
        policies: PolicyHolder,
        limiter: Limiter,
        authenticator: Authenticator,
        *,
        ask_seconds: float = ASK_SECONDS,
    ) -> None:
        self._ask_seconds = ask_seconds
        self._limiter = limiter
        self._authenticator = authenticator
        self._ledger = ledger
        self._fleet = fleet
        self._policies = policies
        self._due: deque[Sequence[OpenCall]] = deque()  # by call
        self._closed: deque[tuple[OpenCall, Receipt]] = deque()
        self._some = asyncio.Event()

    def take_over(self) -> None:
        """What the life before has left open. Right after the ledger was opened."""
        self._closed.extend(self._ledger.recently_closed())
        self._due.extend(self._ledger.open_calls())
        if self._due:
            log.warning("%d calls were open when the gateway ended: they get their receipts now", len(self._due))

    def add_unbilled(self, opened: OpenCall) -> None:
        """An attempt in vain, of a call that has its receipt. Beyond MAX_DUE it waits for the next start."""
        if len(self._due) < MAX_DUE:
            self._due.append((opened,))
            self._some.set()

    async def run(self) -> None:
        """For ever. What is then left stays open in the ledger, for the next start."""
        while True:
            await self.catch_up()
            self._some.clear()
            await self._some.wait()

    async def catch_up(self) -> None:
        """Close all that is due."""
        await asyncio.gather(*[self._settle_some() for _ in range(min(MAX_CONCURRENT_LOOKUPS, len(self._closed)))])
        await asyncio.gather(*[self._close_some() for _ in range(min(MAX_CONCURRENT_LOOKUPS, len(self._due)))])

    async def _close_some(self) -> None:
        while self._due:
            attempts = self._due.popleft()
            with contextlib.suppress(LedgerUnavailable):  # which is in the log; the next start tries again
                if not (attempts[0].in_vain or attempts[0].held):
                    await self._close(attempts)
                    attempts = list(self._ledger.open_attempts(attempts[0].call_id))
                for each in attempts:
                    if each in self._ledger.open_attempts(each.call_id):
                        await self._close_in_vain(each)

    async def _settle_some(self) -> None:
        while self._closed:
            opened, receipt = self._closed.popleft()
            cost_nanos = atoms_to_nanos(text_to_atoms(receipt.cost or "0"))
            try:
                call = await self._with_its_owner(call_of(opened, self._policies.current))
                await self._limiter.settle_orphaned(call, usage_of_receipt(receipt), cost_nanos)
            except StorageUnavailable as error:
                log.warning("%d calls may not be charged to budgets: %s", len(self._closed) + 1, error.message)
                self._closed.clear()

    async def _with_its_owner(self, call: Call) -> Call:
        """The call with the limits of its key."""
        owner = await self._authenticator.principal_of(call.principal.key_id, call.policy)
        if owner is None or owner.tenant.name != call.principal.tenant.name:
            return call
        return msgspec.structs.replace(call, principal=owner)

    async def _close(self, attempts: Sequence[OpenCall]) -> None:
        last = attempts[-1]
        policy = self._policies.current
        call = call_of(last, policy)
        usage, deployment = await self._ask(call, attempts)
        config = deployment.config if deployment is not None else None
        timings = PhaseTimings()
        timings.started_ns = rfc3339_to_ns(last.started)
        timings.ended_ns = max(timings.now_ns(), timings.started_ns)  # the clock may have been set back since
        bill = bill_of(call, usage, config, arrived_ns=timings.started_ns, service_tier=call.service_tier)
        lost = Outcome.GATEWAY_LOST
        tried = [
            Attempt(each.deployment, lost.value, timings.started_ns, timings.ended_ns, span_id=0) for each in attempts
        ]
        receipt = make_receipt(
            call, usage, outcome=lost, timings=timings, bill=bill, attempts=tried, deployment=config,
            started=last.started, trace_id=last.trace_id,
        )  # fmt: skip
        self._ledger.append(receipt)
        await self._charge(call, usage, atoms_to_nanos(bill.cost or 0), timings.started_ns / 1e9)

    async def _charge(self, call: Call, usage: Usage, cost_nanos: int, admitted: float) -> None:
        try:
            await self._ledger.durable()
            call = await self._with_its_owner(call)
            await self._limiter.charge_orphaned(call, usage, cost_nanos, admitted=admitted)
        except StorageUnavailable as error:
            log.warning("no budget was charged for the call %s: %s", call.id, error.message)

    async def _close_in_vain(self, opened: OpenCall) -> None:
        usage, deployment = await self._ask(call_of(opened, self._policies.current), [opened])
        if deployment is None or not usage.exact:
            usage = Usage()
        self._ledger.append(
            UnbilledWork(
                event_id=new_event_id(),
                call_id=opened.call_id,
                attempt=opened.attempt,
                tenant=opened.tenant,
                key_id=opened.key_id,
                model_asked=opened.model_asked,
                deployment=opened.deployment,
                started=opened.started,
                finished=max(rfc3339(time.time_ns()), opened.started),
                exact=usage.exact,
                input_uncached=usage.input_uncached,
                cache_read=usage.cache_read,
                cache_write=usage.cache_write,
                output=usage.output,
                reasoning=usage.reasoning,
                trace_id=opened.trace_id,
            )
        )

    async def _ask(self, call: Call, attempts: Sequence[OpenCall]) -> tuple[Usage, DeploymentState | None]:
        """What was used, and whose work it was; the last attempt that has a record."""
        deadline = time.monotonic() + self._ask_seconds
        while True:
            deployments = {deployment.name: deployment for deployment in self._fleet}
            asked = [
                (deployments[each.deployment], each) for each in reversed(attempts) if each.deployment in deployments
            ]
            for deployment, opened in asked:
                if (record := await deployment.provider.recorded_usage(opened.request_id)) is not None:
                    meter = Meter(call)
                    meter.read_record(record)
                    return meter.usage, deployment
            if time.monotonic() >= deadline or not any(
                deployment.provider.has_usage_records for deployment, _ in asked
            ):
                break
            await asyncio.sleep(ASK_AGAIN_SECONDS)
        for deployment, _ in asked:
            if deployment.provider.has_usage_records and await deployment.provider.healthy():
                return Usage(), deployment
        return Usage(input_uncached=call.prompt_tokens_estimate), asked[0][0] if asked else None


def usage_of_receipt(receipt: Receipt) -> Usage:
    return Usage(
        receipt.input_uncached, receipt.cache_read, receipt.cache_write, receipt.output, receipt.reasoning,
        receipt.exact, receipt.audio_input, receipt.audio_output, receipt.cache_write_1h,
    )  # fmt: skip


def call_of(opened: OpenCall, policy: Policy) -> Call:
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
