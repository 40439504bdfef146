"""Crash recovery: writes the missing receipts of calls in flight when a gateway died, and charges their limits.

Crash recovery also records unbilled work: the attempts of calls that are billed by another attempt.

    call without a receipt --> query its deployments' usage records, newest attempt first --> receipt `gateway_lost`

Recovery runs in the background. A call stays open in the ledger until its receipt is written, even if the gateway is
restarted again before that. The billed usage depends on the deployments' usage records:

  a deployment has a record of the call            exact: the counts in the record
  a deployment keeps records, but not of the call  estimate: nothing. The deployment was killed as well, or the request
                                                   never arrived. If the call is older than records are kept, it is
                                                   billed as if there were none.
  the record's counts are implausible              estimate: the estimated prompt
  discovery has not found the deployment yet       it is looked up again, at most for `LOOKUP_SECONDS`
  no record can be fetched                         estimate: the prompt, and what the ledger has noted of the answer,
                                                   which may lack the last `gateway.settlement.NOTED_BYTES`

The prompt's estimate uses what the deployment has counted of the last prompts before the crash. The module
`gateway.billing.unbilled` says what an unbilled attempt counts.

At most `MAX_CONCURRENT_LOOKUPS` lookups run at a time. A call whose record is not there yet is looked up again later,
and does not hold up the others meanwhile.

If one call cannot be closed, for example because a newer version wrote its row, the others are closed nevertheless.

As soon as the receipt is durable, the cost is charged. If the storage still has the dead gateway's reservation, the
reservation is settled. Otherwise the cost is charged to the budgets of the period in which the call began.

A gateway writes a receipt first and charges its cost afterwards, so it may have died in between. The newest calls with
receipts are therefore settled a second time, which is idempotent. Calls that were admitted from slices
(`gateway.limits.slices`) have no reservations of their own. For them, the storage knows the last receipt whose cost it
has, so the receipts after that one are charged. Then the gateway may lease slices.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import deque
from collections.abc import Sequence
from itertools import count

import msgspec

from gateway.auth.authenticator import Authenticator
from gateway.billing.ledger import Ledger, OpenCall
from gateway.billing.metering import Meter
from gateway.billing.receipts import bill_of, make_receipt
from gateway.billing.unbilled import UnbilledAttempt, unbilled_row
from gateway.core.errors import LedgerUnavailable, StorageUnavailable
from gateway.core.money import atoms_to_nanos, text_to_atoms
from gateway.core.times import rfc3339_to_ns
from gateway.deployments.fleet import Fleet
from gateway.deployments.instances import unknown_instance
from gateway.deployments.state import DeploymentState
from gateway.limits.limiter import Limiter
from gateway.limits.scope import tenant_prefix
from gateway.limits.slices import Slices
from gateway.policy import Deployment, LatencyClass, Model, Policy, Tenant
from gateway.policy.file import PolicyHolder
from gateway.storage.base import SpendCharge
from gateway.types import Attempt, Call, Operation, Outcome, PhaseTimings, Principal, Receipt, Trace, Usage

# How long lookups are retried while a deployment does not answer, has no usage record yet, or is not discovered yet.
LOOKUP_SECONDS = 20.0  # longer than a gateway waits at its start for the first lists of servers
RECORDS_KEPT_SECONDS = 3_000.0  # less than any deployment keeps its usage records; the bundled engine's: an hour
LOOKUP_RETRY_SECONDS = 1.0  # before the first retry; each further one waits twice as long
MAX_CONCURRENT_LOOKUPS = 16
POLL_SECONDS = 0.1  # how soon a queued call is noticed while other lookups run
MAX_DUE = 10_000  # calls that wait for their lookup

log = logging.getLogger(__name__)


class _RecordPending(Exception):
    """A deployment has no usage record of the attempt yet, and may still write one."""


class _QueuedCall(msgspec.Struct, order=True):
    """A call that waits for a lookup of its open attempts. Ordered by the time of the lookup."""

    due_at: float  # monotonic seconds; 0: at once
    number: int  # breaks ties
    deadline: float  # from here on, a missing record means that there is none
    pause_seconds: float  # before the next lookup
    attempts: Sequence[OpenCall]
    unbilled: UnbilledAttempt | None = None  # the only one of `attempts`, if its end is known


class CrashRecovery:
    """Closes the open calls of a gateway that died, and records unbilled attempts (`add_unbilled`).

    `owner` is the name in the storage of the gateway that wrote the ledger. Start `run` as a task after the ledger is
    opened, and stop it before the ledger is closed.
    """

    def __init__(
        self,
        ledger: Ledger,
        fleet: Fleet,
        policies: PolicyHolder,
        limiter: Limiter,
        authenticator: Authenticator,
        *,
        owner: str,
        lookup_seconds: float = LOOKUP_SECONDS,
    ) -> None:
        self._owner = owner
        self._lookup_seconds = lookup_seconds
        self._limiter = limiter
        self._authenticator = authenticator
        self._ledger = ledger
        self._fleet = fleet
        self._policies = policies
        self._due: deque[_QueuedCall] = deque()  # calls that have not been looked up yet
        self._retries: list[_QueuedCall] = []  # a heap; they wait for a record without taking a lookup's place
        self._numbers = count()
        self._closed: deque[tuple[OpenCall, Receipt]] = deque()
        self._leased: list[Receipt] = []
        self._charging = asyncio.Lock()  # for the order of the receipts of another gateway
        self._has_due = asyncio.Event()
        self.failed = 0  # calls that could not be closed or settled because of a bug or an unreadable row

    def take_over(self) -> None:
        """Queue the calls that the previous process left open. Call this right after the ledger is opened."""
        self._closed.extend(self._ledger.recently_closed())
        self._leased.extend(self._ledger.recently_leased())
        for name, estimate, counted in self._ledger.recently_counted():
            if (deployment := self._fleet.find(name)) is not None:
                deployment.token_rates.learn_prompt(estimate, counted)
        for attempts in self._ledger.open_calls():
            self._queue(attempts, self._lookup_seconds)
        if self._due:
            log.warning("%d calls were in flight when the gateway died; writing their receipts now", len(self._due))

    def add_unbilled(self, attempt: UnbilledAttempt) -> None:
        """Queue an unbilled attempt. If `MAX_DUE` calls are queued already, it is recorded after the next start."""
        if len(self._due) + len(self._retries) < MAX_DUE:
            self._queue((attempt.opened,), 0.0 if attempt.has_ended else self._lookup_seconds, attempt)
            self._has_due.set()

    def _queue(
        self, attempts: Sequence[OpenCall], lookup_seconds: float, unbilled: UnbilledAttempt | None = None
    ) -> None:
        deadline = time.monotonic() + lookup_seconds
        self._due.append(_QueuedCall(0.0, next(self._numbers), deadline, LOOKUP_RETRY_SECONDS, attempts, unbilled))

    async def run(self) -> None:
        """Close queued calls, forever. Calls that are still open at the end are closed after the next start."""
        while True:
            await self.catch_up()
            self._has_due.clear()
            await self._has_due.wait()

    async def catch_up(self) -> None:
        """Charge, settle and close all queued calls."""
        if self._leased:
            await self._charge_leased()
        if self._writes_own_chain and self._limiter.slices is not None:
            self._limiter.slices.begin_leasing()
        await asyncio.gather(*[self._settle_some() for _ in range(min(MAX_CONCURRENT_LOOKUPS, len(self._closed)))])
        async with asyncio.TaskGroup() as tasks:
            lookups = set[asyncio.Task[None]]()
            while self._due or self._retries or lookups:
                while len(lookups) < MAX_CONCURRENT_LOOKUPS and (call := self._next_call()) is not None:
                    lookups.add(tasks.create_task(self._try_to_close(call)))
                if lookups:
                    _, lookups = await asyncio.wait(lookups, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(POLL_SECONDS)

    @property
    def _writes_own_chain(self) -> bool:
        """Whether the ledger is that of this process, and not of a departed worker."""
        slices = self._limiter.slices
        return slices is not None and slices.owner == self._owner

    async def _charge_leased(self) -> None:
        """Charge the receipts of calls from slices that the dead gateway did not report."""
        slices = self._limiter.slices
        if slices is None:
            return
        by_root: dict[str, dict[str, Receipt]] = {}
        for receipt in self._leased:
            root = receipt.parents[0] if receipt.parents else receipt.tenant
            by_root.setdefault(root, {})[receipt.event_id] = receipt
        for root, receipts in by_root.items():
            prefix = tenant_prefix(root)
            unsettled = await slices.unsettled_receipts(prefix, self._owner, list(receipts))
            costs: dict[str, SpendCharge] = {}
            for event_id in unsettled:
                try:
                    for charge in await self._charges_of(receipts[event_id], root):
                        before = costs.get(charge.key)
                        amount = charge.amount + (before.amount if before is not None else 0)
                        costs[charge.key] = msgspec.structs.replace(charge, amount=amount)
                except StorageUnavailable:
                    raise  # the supervisor tries again
                except Exception:
                    self.failed += 1
                    log.exception("the call %s could not be charged again", receipts[event_id].call_id)
            if unsettled:
                await slices.charge_receipts(prefix, self._owner, list(costs.values()), unsettled[-1])
        self._leased.clear()

    async def _charges_of(self, receipt: Receipt, root: str) -> list[SpendCharge]:
        """Return the charges of a receipt. Empty if its tenant has another root now, which had no slices for it."""
        cost_nanos = atoms_to_nanos(text_to_atoms(receipt.cost or "0"))
        call = await self._with_key_limits(self._call_of(receipt))
        if call.principal.tenant.root != root:
            return []
        return self._limiter.budget_charges(call, cost_nanos, admitted=rfc3339_to_ns(receipt.started) / 1e9)

    def _next_call(self) -> _QueuedCall | None:
        """The next call to look up now. Calls that wait for a record come after the others."""
        if self._due:
            return self._due.popleft()
        if self._retries and self._retries[0].due_at <= time.monotonic():
            return heapq.heappop(self._retries)
        return None

    async def _try_to_close(self, call: _QueuedCall) -> None:
        try:
            await self._close_call(call)
        except _RecordPending:
            call.due_at = time.monotonic() + call.pause_seconds
            call.pause_seconds *= 2
            heapq.heappush(self._retries, call)
        except LedgerUnavailable:
            pass  # already logged by the ledger; retried after the next start
        except Exception:
            self.failed += 1
            log.exception("the call %s could not be closed; the next start tries again", call.attempts[0].call_id)

    async def _close_call(self, call: _QueuedCall) -> None:
        # No receipt is due if the call has one, or if its receipt waits for a batch line's result.
        if not (call.attempts[0].in_vain or call.attempts[0].held):
            await self._close(call)
            call.attempts = list(self._ledger.open_attempts(call.attempts[0].call_id))
        for each in call.attempts:
            if each in self._ledger.open_attempts(each.call_id):
                known = call.unbilled
                is_known = known is not None and known.opened.attempt == each.attempt
                await self._close_unbilled(known if known and is_known else UnbilledAttempt(each), call.deadline)

    async def _settle_some(self) -> None:
        while self._closed:
            opened, receipt = self._closed.popleft()
            try:
                cost_nanos = atoms_to_nanos(text_to_atoms(receipt.cost or "0"))
                call = await self._with_key_limits(self._call_of(opened))
                await self._limiter.settle_orphaned(call, usage_of_receipt(receipt), cost_nanos)
            except StorageUnavailable as error:
                count = len(self._closed) + 1
                log.warning("budgets may lack the cost of %d calls, because settling failed: %s", count, error.message)
                self._closed.clear()
            except Exception:
                self.failed += 1
                log.exception("the call %s could not be settled again; budgets may lack its cost", receipt.call_id)

    def _call_of(self, row: OpenCall | Receipt) -> Call:
        policy = self._policies.current
        try:
            owner = self._authenticator.tenant(row.tenant, policy)
        except StorageUnavailable:
            owner = None
        return call_of_row(row, policy, owner)

    async def _with_key_limits(self, call: Call) -> Call:
        """Add the key's present limits to the call, if the key still exists and is still a key of the same tenant."""
        owner = await self._authenticator.principal_of(call.principal.key_id, call.policy)
        if owner is None or owner.tenant.name != call.principal.tenant_name:
            return call
        return msgspec.structs.replace(call, principal=owner)

    async def _close(self, queued: _QueuedCall) -> None:
        attempts, last = queued.attempts, queued.attempts[-1]
        call = self._call_of(last)
        usage, deployment, implausible = await self._look_up_usage(call, attempts, queued.deadline)
        config = deployment.config if deployment is not None else self._unknown_instance(call, attempts)
        timings = PhaseTimings()
        timings.started_ns = rfc3339_to_ns(last.started)
        timings.ended_ns = max(timings.now_ns(), timings.started_ns)  # the clock may have been set back since
        bill = bill_of(call, usage, config, arrived_ns=timings.started_ns, service_tier=call.service_tier)
        lost = Outcome.GATEWAY_LOST
        tried = [
            Attempt(each.deployment, lost.value, timings.started_ns, timings.ended_ns, span_id=0) for each in attempts
        ]
        slices = self._limiter.slices if last.leased else None
        if slices is not None:
            try:
                call = await self._with_key_limits(call)
            except StorageUnavailable:
                raise _RecordPending from None  # it is closed when the storage answers
        receipt = make_receipt(
            call, usage, outcome=lost, timings=timings, bill=bill, attempts=tried, deployment=config,
            started=last.started, trace_id=last.trace_id, implausible=implausible, leased=slices is not None,
        )  # fmt: skip
        if slices is not None:
            await self._close_leased(call, receipt, slices)
        else:
            self._ledger.append(receipt)
        if implausible is not None and deployment is not None:
            deployment.failures.usage_implausible(implausible, call.id, asyncio.get_running_loop().time())
        if slices is None:
            await self._charge(call, usage, atoms_to_nanos(bill.cost or 0), timings.started_ns / 1e9)

    async def _close_leased(self, call: Call, receipt: Receipt, slices: Slices) -> None:
        """Write the receipt of a call from slices, and charge its cost in the order of the ledger."""
        root, cost_nanos = tenant_prefix(call.principal.tenant.root), atoms_to_nanos(text_to_atoms(receipt.cost or "0"))
        charges = self._limiter.budget_charges(call, cost_nanos, admitted=rfc3339_to_ns(receipt.started) / 1e9)
        if self._writes_own_chain:
            self._ledger.append(receipt)
            slices.charge_cost(root, charges, receipt.event_id)
            return
        async with self._charging:
            self._ledger.append(receipt)
            await self._ledger.durable()
            await slices.charge_receipts(root, self._owner, charges, receipt.event_id)

    async def _charge(self, call: Call, usage: Usage, cost_nanos: int, admitted: float) -> None:
        try:
            await self._ledger.durable()
            call = await self._with_key_limits(call)
            await self._limiter.charge_orphaned(call, usage, cost_nanos, admitted=admitted)
        except StorageUnavailable as error:
            log.warning("budgets lack the cost of call %s, because charging failed: %s", call.id, error.message)

    async def _close_unbilled(self, attempt: UnbilledAttempt, deadline: float) -> None:
        call = self._call_of(attempt.opened)
        if attempt.counted is not None:
            entry = call.policy.deployment(attempt.opened.deployment)
            self._ledger.append(unbilled_row(attempt, call, attempt.counted, entry))
            return
        usage, deployment, _ = await self._look_up_usage(call, [attempt.opened], deadline)
        config = deployment.config if deployment is not None else self._unknown_instance(call, [attempt.opened])
        if not usage.exact:
            keeps_records = deployment is not None and deployment.provider.has_usage_records
            usage = Usage() if keeps_records else attempt.estimate(usage.input_uncached, config)
        self._ledger.append(unbilled_row(attempt, call, usage, config))

    async def _look_up_usage(
        self, call: Call, attempts: Sequence[OpenCall], deadline: float
    ) -> tuple[Usage, DeploymentState | None, str | None]:
        """Return the usage of the newest attempt that has a usage record, and the attempt's deployment.

        The third value says why the record's counts are implausible, if they are. Raises `_RecordPending` before the
        deadline (monotonic seconds) if a deployment may still write a record, or may still be discovered.
        """
        found = [(self._fleet.find(each.deployment), each) for each in reversed(attempts)]
        candidates = [(deployment, each) for deployment, each in found if deployment is not None]
        for deployment, opened in candidates:
            if (record := await deployment.provider.recorded_usage(opened.request_id)) is not None:
                meter = Meter(call, deployment.config)
                meter.read_record(record)
                if meter.implausible is not None:
                    meter.bill_prompt()
                return meter.usage, deployment, meter.implausible
        may_have_record = any(
            self._fleet.template_of(each.deployment) is not None
            if deployment is None
            else deployment.provider.has_usage_records
            for deployment, each in found
        )
        if may_have_record and time.monotonic() < deadline:
            raise _RecordPending
        has_expired = time.time() - rfc3339_to_ns(attempts[0].started) / 1e9 > RECORDS_KEPT_SECONDS
        for deployment, _ in () if has_expired else candidates:
            # This deployment keeps records but has none of the call: it was restarted, or never received the request.
            if deployment.provider.has_usage_records and await deployment.provider.healthy():
                return Usage(), deployment, None
        last = max(attempts, key=lambda each: each.attempt)
        newest = candidates[0][0] if candidates else None
        prompt_tokens = last.billed_prompt_tokens
        if newest is not None and last.expected_prompt_tokens:  # the rate may be better known now
            prompt_tokens = newest.token_rates.prompt_tokens(last.prompt_tokens_estimate)
        return Usage(input_uncached=prompt_tokens, output=last.output_tokens_received), newest, None

    def _unknown_instance(self, call: Call, attempts: Sequence[OpenCall]) -> Deployment | None:
        """The deployment of the newest attempt, if discovery found it before the crash and has not found it since."""
        name = attempts[-1].deployment
        template = self._fleet.template_of(name)
        return None if template is None else unknown_instance(template, name, call.model_name)


def usage_of_receipt(receipt: Receipt) -> Usage:
    """Return the usage that a receipt records."""
    return Usage(
        receipt.input_uncached, receipt.cache_read, receipt.cache_write, receipt.output, receipt.reasoning,
        receipt.exact, receipt.audio_input, receipt.audio_output, receipt.cache_write_1h,
        receipt.remainder,
    )  # fmt: skip


def _operation_of(row: OpenCall | Receipt) -> Operation:
    """The operation of a row. The receipt of a passed request has the path instead, for example `rerank`."""
    try:
        return Operation(row.operation)
    except ValueError:
        if isinstance(row, Receipt):
            return Operation.PASSED
        raise


def call_of_row(row: OpenCall | Receipt, policy: Policy, owner: Tenant | None = None) -> Call:
    """Rebuild a call from a row of the ledger, with the fields that a receipt and its limits need.

    `owner` is its tenant, by default the policy's. If the policy no longer has the tenant, model or latency class, a
    default with the same name replaces it.
    """
    name = row.model_routed or row.model_asked
    model = policy.find_model(name)
    return Call(
        id=row.call_id,
        operation=_operation_of(row),
        principal=Principal(owner or policy.tenants_by_name.get(row.tenant) or Tenant(name=row.tenant), row.key_id),
        policy=policy,
        asked_model=row.model_asked,
        model=model or Model(name=name, deployments=(row.deployment or "",)),
        class_name=row.latency_class,
        latency_class=policy.classes.get(row.latency_class) or LatencyClass(),
        stream=False,
        include_usage=False,
        max_output_tokens=None,
        deterministic=False,
        fields={},
        fingerprint=(),
        prompt_tokens_estimate=row.prompt_tokens_estimate if isinstance(row, OpenCall) else 0,
        cache_salt="",
        service_tier=row.service_tier,
        end_user=row.end_user,
        canonical_steps=(),
        class_rule=None,
        deadline=0.0,
        trace=Trace(int(row.trace_id, 16), 0, sampled=False),
        wildcard=policy.wildcard_part(name),
        route=row.route,
        routed_model=row.model_routed,
    )
