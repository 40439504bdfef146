"""Phase 8: what happens on every way out of an admitted call, once.

The receipt is in the ledger before the last bytes of the answer are sent, so that whoever got a whole answer has
been billed for it, whatever happens next; and before a server is asked, a row there says so, which the next start finds
without its receipt if this process is killed. Then, behind the client's back: its place is free again, the router
learns what was really cached, and the answer goes into the cache. None of this waits longer than a storage operation
may, or is lost to a cancellation. What was reserved is settled to the truth once the receipt is durable, by
`gateway.billing.settler`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType

from gateway.billing.hedge_usage import HedgeUsage
from gateway.billing.metering import Meter
from gateway.billing.open_calls import CallLog, CallOpener
from gateway.billing.receipts import Bill, bill_of, make_receipt
from gateway.billing.settler import Settler
from gateway.core.errors import BudgetSpent, GatewayError, LedgerUnavailable, UpstreamCut, UpstreamTimeout
from gateway.core.money import atoms_to_nanos
from gateway.deployments.fleet import DeploymentState
from gateway.endpoints.exchange import Exchange
from gateway.limits.limiter import UNLIMITED, Reservation
from gateway.providers.base import Fault
from gateway.response_cache import UNRECORDED, Recording, Unrecorded
from gateway.routing.attempts import AttemptLog
from gateway.routing.upstream import Upstream
from gateway.telemetry import CallRecord
from gateway.types import Call, Outcome, Usage


class Settlement:
    """One call's account, open from its admission to its end. Use as `async with`."""

    def __init__(
        self,
        call: Call,
        reservation: Reservation,
        recording: Recording | Unrecorded,
        attempts: AttemptLog,
        exchange: Exchange,
        record: CallRecord,
        call_log: CallLog,
        settler: Settler,
        opener: CallOpener,
        *,
        from_cache: bool = False,
    ) -> None:
        self.meter = Meter(call)
        self.recording = recording
        self._call = call
        self._reservation = reservation
        self._attempts = attempts
        self._exchange = exchange
        self._record = record
        self._call_log = call_log
        self._settler = settler
        self._opener = opener
        self._from_cache = from_cache
        self._hedge_usage: HedgeUsage | None = None  # where a race was won
        self._upstream: Upstream | None = None
        self._recorded_at: DeploymentState | None = None  # who had a record of the call
        self._written = False
        self._settled = False
        self._cost = 0  # in atoms; unpriced work is charged to no budget

    async def __aenter__(self) -> Settlement:
        return self

    def answered_by(self, upstream: Upstream) -> None:
        """A server has given its first chunk: from here on its price holds."""
        self._upstream = upstream
        if self._attempts.lost_hedges:
            self._hedge_usage = HedgeUsage(self._call)
            for deployment in self._attempts.lost_hedges:
                self._hedge_usage.fetch_record(deployment, self._opener.request_id_at(deployment))
        self.meter.strip_every_usage = upstream.deployment.config.continuous_usage and not self._call.continuous_usage
        self._record.deployment = upstream.deployment.name
        self._record.route_choice = upstream.chosen

    def answer_begins(self) -> None:
        """Its first chunk is here, and is watched next."""
        self._record.timings.first_chunk_ns = self._record.timings.now_ns()

    def watch(self, chunk: bytes) -> bytes:
        """A chunk is here: what the client gets of it. With the last one the receipt is written.

        Raises `UpstreamCut` where it says that the server failed, and `LedgerUnavailable`.
        """
        if self.recording is not UNRECORDED:
            self.recording.write(chunk)
        meter = self.meter
        passed_on = meter.watch(chunk)
        if meter.error:
            raise UpstreamCut("the server reported an error in its answer")
        if meter.complete:
            self.write(Outcome.COMPLETE)
        return passed_on

    def watcher(self) -> Callable[[bytes], bytes]:
        """`watch`; of a stream that a budget may cut, with a look at what it costs by now."""
        return self.watch if self._reservation.stream_budget is None else self._watch_cost

    def _watch_cost(self, chunk: bytes) -> bytes:
        passed_on, budget = self.watch(chunk), self._reservation.stream_budget
        if budget is not None and not self.meter.complete:
            budget.check(atoms_to_nanos(self._bill(self.meter.usage).cost or 0))
        return passed_on

    @property
    def _worker(self) -> DeploymentState | None:
        """Whose work is billed."""
        return self._recorded_at or (self._upstream.deployment if self._upstream is not None else None)

    def _bill(self, usage: Usage) -> Bill:
        worker = self._worker
        return bill_of(
            self._call,
            usage,
            worker.config if worker is not None else None,
            arrived_ns=self._record.timings.started_ns,
            service_tier=self.meter.service_tier,
            from_cache=self._from_cache,
        )

    def reply_headers(self) -> dict[str, str]:
        """What the reply says about its own making. What has been cached is known once the engine has counted."""
        headers = {"x-warmpath-class": self._call.class_name, "x-warmpath-overhead-ms": self._overhead_ms()}
        if self._upstream is not None:
            headers["x-warmpath-deployment"] = self._upstream.deployment.name
        if self._from_cache:
            headers["x-warmpath-cache"] = self._record.cache
        usage = self.meter.usage
        if usage.exact:
            headers["x-warmpath-cached-tokens"] = str(usage.cache_read)
        if self._call.canonical_steps:
            headers["x-warmpath-canonical"] = ",".join(self._call.canonical_steps)
        return headers

    def _overhead_ms(self) -> str:
        """Milliseconds from the request's arrival to the first attempt, less the time in the queue."""
        timings = self._record.timings
        asked_ns = self._attempts.done[0].started_ns if self._attempts.done else timings.now_ns()
        queued_ns = timings.between("queue", "route")
        return f"{(asked_ns - timings.started_ns - queued_ns) / 1e6:.2f}"

    def write(self, outcome: Outcome) -> None:
        """Put the receipt into the ledger. The first outcome stands. Raises `LedgerUnavailable`."""
        if self._written:
            return
        if outcome is Outcome.COMPLETE and self._exchange.client_gone:  # completed for its followers
            outcome = Outcome.CLIENT_GONE
        self._written = True
        record, upstream, worker = self._record, self._upstream, self._worker
        if upstream is not None:
            record.deployment = upstream.deployment.name  # it may have gone on at another one
            self.meter.is_estimated = upstream.is_estimated
            if self._attempts.done:
                self._attempts.conclude("ok" if self.meter.complete else _fault(outcome, upstream.fault))
        if self._attempts.lost_hedges:
            self._attempts.done = (self._hedge_usage or HedgeUsage(self._call)).with_usage(self._attempts.done)
        record.outcome = outcome
        record.attempts = self._attempts.done
        record.usage = self.meter.usage
        deployment = worker.config if worker is not None else None
        bill = self._bill(record.usage)
        opened = self._opener.opened
        receipt = make_receipt(
            self._call,
            record.usage,
            outcome=outcome,
            timings=record.timings,
            bill=bill,
            attempts=self._attempts.done,
            deployment=deployment,
            from_cache=self._from_cache,
            started=opened[0].started if opened else None,
            trace_id=opened[0].trace_id if opened else None,
        )
        self._cost = bill.cost or 0
        self._call_log.append(receipt)
        if worker is not None:
            worker.billed(record.usage)
        record.event_id = receipt.event_id

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._written:
            self._record.timings.enter("settle")
        if self._to_be_billed:
            self._exchange.unwatch()  # what the client does now changes nothing any more
        if error is not None:
            self.recording.fail(error if isinstance(error, GatewayError) else None)
        if error is not None or not self._written:  # else `relay` came to its end, and has settled
            try:
                await self._conclude(error)
            finally:  # cancelled or not
                await self.settle()
        upstream, usage = self._upstream, self.meter.usage
        if upstream is not None and self.meter.complete:
            upstream.completed()
        if upstream is not None and usage.exact:
            upstream.sent.learn_cached(usage.input, usage.cache_read)
            upstream.sent.learn_usage(self._call.id, usage.input, usage.cache_read, usage.output)
        if error is None:  # a fallback's answer is good for those who asked now, and not for those who ask later
            await self.recording.finish(
                keep=upstream is not None and upstream.deployment.name in self._call.model.deployments
            )

    @property
    def _to_be_billed(self) -> bool:
        """Whether it was sent to a server, or answered from the cache. Where neither, the call may still go on."""
        return bool(self._attempts.done) or self._exchange.status is not None

    async def _conclude(self, error: BaseException | None) -> None:
        """Write the receipt, where there is none yet."""
        try:
            if error is not None and not self._written:
                await self._ask_who_worked()
        finally:
            self._record.timings.enter(
                "settle"
            )  # a server that was asked how far it came has been waited for until here
            if self._to_be_billed:
                with contextlib.suppress(LedgerUnavailable):  # the receipt is in the log then
                    self.write(self._outcome(error))

    async def _ask_who_worked(self) -> None:
        """The answer ended early; the server that worked on it may know how far it came."""
        deployment = self._attempts.asked
        if deployment is None or not self._opener.opened:
            return
        if (told := await deployment.provider.recorded_usage(self._opener.request_id_at(deployment))) is not None:
            self.meter.read_record(self._upstream.as_one(told) if self._upstream is not None else told)
            self._recorded_at = deployment
        elif self._exchange.client_gone and self.meter.lacks_engine_counts:  # nobody waits for this
            tokens = await deployment.provider.count_prompt_tokens(self._call)
            if tokens is not None:
                self.meter.set_prompt_tokens(tokens)

    async def settle(self) -> None:
        """Give its place back, and have the truth paid as soon as the receipt is durable. The first time counts."""
        if self._settled or self._reservation is UNLIMITED:
            return
        self._settled = True
        if not self._written:
            await self._reservation.release()
            return
        tenant = self._call.principal.tenant.name
        self._settler.settle(self._reservation, self.meter.usage, atoms_to_nanos(self._cost), tenant)
        await self._reservation.release_slot()

    def _outcome(self, error: BaseException | None) -> Outcome:
        if error is None:
            return Outcome.COMPLETE
        if isinstance(error, asyncio.CancelledError):
            return Outcome.CLIENT_GONE if self._exchange.client_gone else Outcome.UPSTREAM_CUT
        if isinstance(error, BudgetSpent):
            return Outcome.BUDGET_SPENT
        timed_out = self._upstream is not None and self._upstream.fault is Fault.TIMEOUT
        if isinstance(error, UpstreamTimeout) or (isinstance(error, UpstreamCut) and timed_out):
            return Outcome.TIMEOUT
        return Outcome.UPSTREAM_CUT if self._record.timings.first_chunk_ns else Outcome.REFUSED


def _fault(outcome: Outcome, fault: Fault | None) -> str:
    return fault.value if fault is not None else outcome.value
