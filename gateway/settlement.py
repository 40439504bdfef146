"""Phase 8: ends an admitted call exactly once, whether it completes, fails or is cancelled.

Settlement writes the receipt, frees the concurrency slot, settles the reservation and stores the answer in the cache.

A client that has a whole answer has been billed for it, whatever happens next: the receipt is in the ledger before the
last bytes of the answer are sent. Before each attempt, the ledger gets an open call. If this process is killed, the
next start finds the open call without a receipt and bills it (`gateway.billing.recovery`).

After the client has its answer, settlement frees the concurrency slot, tells the router how many prompt tokens were
cached, and stores the answer in the response cache. Each of these waits no longer than one storage operation may take,
and a cancellation loses none of them. `gateway.billing.settler` settles the reservation to actual usage once the
receipt is durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec

from gateway.billing.disconnects import ReadToEnd, client_ended, count_early_end, was_working
from gateway.billing.hedge_usage import HedgeUsage
from gateway.billing.metering import Meter
from gateway.billing.native_metering import NativeMeter, PassedStreamMeter
from gateway.billing.open_calls import CallLog, CallOpener
from gateway.billing.prefilled_prompt import with_prefill_billed
from gateway.billing.receipts import Bill, bill_of, make_receipt
from gateway.billing.settler import Settler
from gateway.core.errors import BudgetSpent, GatewayError, LedgerUnavailable, UpstreamCut, UpstreamTimeout
from gateway.core.money import atoms_to_nanos
from gateway.core.native_requests import PASSED
from gateway.deployments.state import DeploymentState
from gateway.deployments.token_rates import TokenRates
from gateway.endpoints.exchange import Exchange
from gateway.limits.limiter import UNLIMITED, Reservation
from gateway.prompts.media.calibration import MediaCalibration
from gateway.providers.base import Fault, Sink
from gateway.providers.text_events import DirectText, TextSink
from gateway.response_cache import UNRECORDED, Recording, Unrecorded
from gateway.routing.attempt_log import AttemptLog
from gateway.routing.upstream import Upstream
from gateway.telemetry import CallRecord
from gateway.types import Attempt, Call, Outcome, Usage

NOTED_BYTES = 16 * 1024  # of a stream, after which the ledger notes again how much of it has been received


class CallInFlight(msgspec.Struct, frozen=True):
    """One call, with everything that belongs to it alone until its reply is over."""

    call: Call
    exchange: Exchange
    record: CallRecord  # phase timings, and what telemetry reports
    attempts: AttemptLog
    opener: CallOpener  # writes an open call before each attempt
    call_log: CallLog  # takes the receipt
    media_calibration: MediaCalibration  # learns how models count media
    read_to_end: ReadToEnd  # whether the call continues without its client


class Settlement:
    """One admitted call, from its admission to its end. Use as `async with`."""

    def __init__(
        self,
        flight: CallInFlight,
        reservation: Reservation,
        settler: Settler,
        recording: Recording | Unrecorded = UNRECORDED,
        *,
        from_cache: bool = False,
    ) -> None:
        self.meter = Meter(flight.call)
        self.recording = recording
        self._call = flight.call
        self._exchange = flight.exchange
        self._record = flight.record
        self._attempts = flight.attempts
        self._opener = flight.opener
        self._opener.leased = reservation.is_leased
        self._opener.before_attempt = flight.read_to_end.before_attempt  # until the exit, since this forms a cycle
        self._call_log = flight.call_log
        self._media_calibration = flight.media_calibration
        self._reservation = reservation
        self._settler = settler
        self._from_cache = from_cache
        self._read_to_end = flight.read_to_end
        self._note_output_at = math.inf  # bytes received, after which the ledger gets the number of output tokens
        self._direct: DirectText | None = None  # passes on text, until the ledger notes the output again
        self._hedge_usage: HedgeUsage | None = None  # set if a hedged attempt won
        self._upstream: Upstream | None = None
        self._left_at: DeploymentState | None = None  # the deployment that worked when the call ended early
        self._written = False
        self._learned = False
        self._settled = False
        self._cost_nanos = 0  # unpriced work is charged to no budget

    async def __aenter__(self) -> Settlement:
        return self

    def answered_by(self, upstream: Upstream) -> None:
        """A deployment has sent its first chunk. From here on its price applies."""
        self._upstream = upstream
        if self._attempts.lost_hedges:
            self._hedge_usage = HedgeUsage(self._call)
            for deployment in self._attempts.lost_hedges:
                self._hedge_usage.fetch_record(deployment, self._opener.request_id_at(deployment))
        self.meter.answered_by(upstream.deployment.config, upstream.deployment.token_rates)
        if not upstream.deployment.provider.has_usage_records:
            self._note_output_at = float(NOTED_BYTES)
        self.meter.strip_every_usage = upstream.deployment.config.continuous_usage and not self._call.continuous_usage
        self._record.deployment = upstream.deployment.name
        self._record.route_choice = upstream.chosen

    def answer_begins(self, api: str | None = None) -> None:
        """The first chunk of the answer has arrived; `watch` gets it next. `api` is its API format, if not OpenAI's."""
        if api is not None:
            self.meter = self._meter_of(api)
            if self._upstream is not None:
                self.meter.answered_by(self._upstream.deployment.config, self._upstream.deployment.token_rates)
            self.recording.answered_in(api)
            self._exchange.answer_in_clients_format()
        self._record.timings.first_chunk_ns = self._record.timings.now_ns()

    def _meter_of(self, api: str) -> Meter:
        if api != PASSED:
            return NativeMeter(self._call, api)
        assert self._upstream is not None  # such answers are not cached
        return PassedStreamMeter(self._call, self._upstream.response.ends_stream)

    def watch(self, chunk: bytes) -> bytes:
        """Count a chunk and return what the client gets of it. The last chunk writes the receipt.

        Raises `UpstreamCut` if the chunk reports a failure of the deployment, and `LedgerUnavailable`.
        """
        if self.recording is not UNRECORDED:
            self.recording.write(chunk)
        meter = self.meter
        passed_on = meter.watch(chunk)
        if meter.error:
            raise UpstreamCut("the deployment reported an error in its answer")
        if meter.complete:
            self.write(Outcome.COMPLETE)
            return passed_on
        if (received := meter.text.received) >= self._note_output_at:
            self._note_output(received)
        if self._exchange.client_gone:
            self._read_to_end.check_cost(self._bill(meter.usage).cost)
        return passed_on

    def bill_withheld(self, content: bytes) -> None:
        """Bill a complete answer that the client does not get, because a hook rejected it."""
        self.meter.watch(content)
        self.write(Outcome.COMPLETE)

    def _note_output(self, received: int) -> None:
        """Let the ledger have the number of output tokens so far. So many bytes have been received."""
        self._note_output_at = float(received + NOTED_BYTES)
        if self._direct is not None:
            self._direct.until = self._note_output_at
        self._opener.note_output(self.meter.usage.output)

    def text_sink(self, sink: Sink) -> TextSink | None:
        """A faster `sink` for events that only add text. None if `watch` or the exchange must see every chunk."""
        exchange, write = self._exchange, self._exchange.unchanged_writer
        is_watched = self.recording is not UNRECORDED or self._reservation.stream_budget is not None
        if write is None or is_watched or type(self.meter) is not Meter:
            return None
        text = self.meter.text

        def take_text(chunk: bytes, events: int) -> bool:
            if not text.events or exchange.client_gone:
                return sink(chunk)
            if text.add(chunk, events) >= self._note_output_at:
                self._note_output(text.received)
            return write(chunk, False) or exchange.put(chunk)

        direct = None
        if text.events and not exchange.client_gone:
            direct = self._direct = exchange.direct_text(text, self._note_output_at)
        return TextSink(take_text, direct)

    def watcher(self) -> Callable[[bytes], bytes]:
        """`watch`, or a form that also checks the cost so far if a budget may cut this stream."""
        return self.watch if self._reservation.stream_budget is None else self._watch_cost

    def _watch_cost(self, chunk: bytes) -> bytes:
        passed_on, budget = self.watch(chunk), self._reservation.stream_budget
        if budget is not None and not self.meter.complete:
            budget.check(atoms_to_nanos(self._bill(self.meter.usage).cost or 0))
        return passed_on

    def _billed_deployment(self) -> DeploymentState | None:
        """The deployment whose work is billed."""
        return self._left_at or (self._upstream.deployment if self._upstream is not None else None)

    def _bill(self, usage: Usage) -> Bill:
        billed = self._billed_deployment()
        return bill_of(
            self._call,
            usage,
            billed.config if billed is not None else None,
            arrived_ns=self._record.timings.started_ns,
            service_tier=self.meter.service_tier,
            from_cache=self._from_cache,
        )

    def reply_headers(self) -> dict[str, str]:
        """The `x-warmpath-*` headers. Has cached tokens only if the engine has counted them."""
        headers = {"x-warmpath-class": self._call.class_name, "x-warmpath-overhead-ms": self._overhead_ms()}
        if self._upstream is not None:
            headers["x-warmpath-deployment"] = self._upstream.deployment.name
        if self._from_cache:
            headers["x-warmpath-cache"] = self._record.cache
        is_uncounted = self._record.usage is None and self.meter.is_uncounted  # then there is nothing to estimate
        if not is_uncounted and (usage := self._usage()).exact:
            headers["x-warmpath-cached-tokens"] = str(usage.cache_read)
        if self._call.canonical_steps:
            headers["x-warmpath-canonical"] = ",".join(self._call.canonical_steps)
        return headers

    def _usage(self) -> Usage:
        """The usage that was billed, or the usage so far."""
        return self._record.usage or self.meter.usage

    def _overhead_ms(self) -> str:
        """Milliseconds from the request's arrival to the first attempt, minus the time in the queue."""
        timings = self._record.timings
        first_attempt_ns = self._attempts.done[0].started_ns if self._attempts.done else timings.now_ns()
        queued_ns = timings.between("queue", "route")
        return f"{(first_attempt_ns - timings.started_ns - queued_ns) / 1e6:.2f}"

    def write(self, outcome: Outcome) -> None:
        """Write the receipt. Only the first outcome counts. Raises `LedgerUnavailable`."""
        if self._written:
            return
        if outcome is Outcome.COMPLETE and self._exchange.client_gone:  # it was completed for its followers only
            outcome = Outcome.CLIENT_GONE
        self._written = True
        record, upstream, billed = self._record, self._upstream, self._billed_deployment()
        if upstream is not None:
            record.deployment = upstream.deployment.name  # a resumed stream ends at another one
            self.meter.is_estimated = upstream.is_estimated
            if self._attempts.done:
                self._attempts.conclude("ok" if self.meter.complete else _fault(outcome, upstream.fault))
        if self._attempts.lost_hedges:
            self._attempts.done = (self._hedge_usage or HedgeUsage(self._call)).with_usage(self._attempts.done)
        record.outcome = outcome
        record.attempts = self._attempts.done
        usage = self.meter.usage
        attempts: Sequence[Attempt] = self._attempts.done
        if attempts[1:]:  # a prefill is an attempt of its own
            usage, attempts = with_prefill_billed(usage, attempts)
        record.usage = usage
        deployment = billed.config if billed is not None else None
        bill = self._bill(usage)
        opened = self._opener.opened
        receipt = make_receipt(
            self._call,
            usage,
            outcome=outcome,
            timings=record.timings,
            bill=bill,
            attempts=attempts,
            deployment=deployment,
            from_cache=self._from_cache,
            started=opened[0].started if opened else None,
            trace_id=opened[0].trace_id if opened else None,
            implausible=None if self._from_cache else self.meter.implausible,
            leased=self._reservation.is_leased,
        )
        self._cost_nanos = atoms_to_nanos(bill.cost or 0)
        record.cost = bill.cost
        if bill.terms is not None:
            record.currency = bill.terms.currency
        self._call_log.append(receipt)
        self._reservation.bill(usage, self._cost_nanos, receipt.event_id)
        if billed is not None:
            billed.add_billed(usage)
            if receipt.implausible is not None:
                now = asyncio.get_running_loop().time()
                billed.failures.usage_implausible(receipt.implausible, self._call.id, now)
        record.event_id = receipt.event_id

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._read_to_end.close()
        self._opener.before_attempt = None
        if error is None and self._written:
            self._record.timings.enter("settle")
        if self._to_be_billed():
            self._exchange.unwatch()  # a disconnect changes nothing from here on
        if error is not None:
            self.recording.fail(error if isinstance(error, GatewayError) else None)
        if error is not None or not self._written:  # otherwise `relay` has settled already
            try:
                await self._conclude(error)
            finally:  # cancelled or not
                await self.settle()
        upstream = self._upstream
        if upstream is not None and self.meter.complete:
            upstream.completed()
        self.learn()
        # A fallback's answer serves this call's followers, but is not cached for later calls.
        if error is None and self.recording is not UNRECORDED:
            await self.recording.finish(
                keep=upstream is not None and upstream.deployment.entry in self._call.model.deployments
            )

    def learn(self) -> None:
        """Let the estimates of the deployment learn from the answer's usage. Idempotent.

        Call it while the call is still at the deployment: how long the call took is learned when it leaves, and is of
        use only with the tokens that it took so long for.
        """
        upstream = self._upstream
        # What is billed may be another deployment's count (`with_prefill_billed`).
        if upstream is None or self._learned or not (usage := self.meter.usage).exact:
            return
        self._learned = True
        input_tokens = usage.input
        self._learn_token_rates(upstream.deployment.token_rates, usage, input_tokens)
        upstream.sent.learn_cached(input_tokens, usage.cache_read)
        upstream.sent.learn_usage(self._call.id, input_tokens, usage.cache_read, usage.output)
        call, calibration = self._call, self._media_calibration
        if calibration.learns_from(call) and upstream.deployment.entry in call.model.deployments:
            calibration.learn(call, input_tokens)  # a fallback's model counts otherwise

    def _learn_token_rates(self, rates: TokenRates, usage: Usage, input_tokens: int) -> None:
        if self._call.media is None:
            rates.learn_prompt(self._call.input_tokens_estimate, input_tokens)
        if not rates.wants_output() or usage.reasoning or usage.audio_output or not self.meter.is_text_whole:
            return  # tokens that arrive in no text, or text that is not measured
        if text_bytes := self.meter.received_text_bytes:
            rates.learn_output(text_bytes, usage.output)

    def _to_be_billed(self) -> bool:
        """Whether the call was sent to a deployment or answered from the cache. If neither, it may still continue."""
        return bool(self._attempts.done) or self._exchange.status is not None

    async def _conclude(self, error: BaseException | None) -> None:
        """Write the receipt if it is missing."""
        try:
            if error is not None and not self._written:
                await self._count_early_end()
        finally:
            self._record.timings.enter("settle")  # time spent waiting for a deployment's own record is its own
            if self._to_be_billed():
                with contextlib.suppress(LedgerUnavailable):  # the log then has the receipt
                    self.write(self._outcome(error))

    async def _count_early_end(self) -> None:
        """Count the answer that ended early: by the deployment's record, or by the rule of its vendor."""
        deployment = self._attempts.last_deployment
        if deployment is None or not self._opener.opened:
            return
        if await count_early_end(
            self.meter,
            self._call,
            deployment,
            self._opener.request_id_at(deployment),
            merge=_unmerged if self._upstream is None else self._upstream.merge_usage,
            was_working=was_working(self._attempts, answered=self._upstream is not None),
            client_ended=client_ended(self._exchange, self._attempts),
            client_waits=not self._exchange.client_gone,
        ):
            self._left_at = deployment

    async def settle(self) -> None:
        """Free the concurrency slot now, and settle the rest when the receipt is durable. Idempotent."""
        if self._settled or self._reservation is UNLIMITED:
            return
        self._settled = True
        if not self._written or self._reservation.is_billed:
            await self._reservation.release()
            return
        tenant = self._call.principal.tenant_name
        self._settler.settle(self._reservation, self._usage(), self._cost_nanos, tenant)
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


def _unmerged(record: bytes) -> bytes:
    return record


def _fault(outcome: Outcome, fault: Fault | None) -> str:
    return fault.value if fault is not None else outcome.value
