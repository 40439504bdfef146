"""Runs one request through all its phases, from its first byte to its receipt. READ THIS FIRST.

This is the gateway's story: each `timings.enter` in `serve` begins one phase, which is one span and one package or
file. A phase passes its result to the next one by value. The `async with` that took a reservation, a slot or a
connection releases it on every way out.

Minimal path 1 of 7. Next: types.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from gateway.auth.authenticator import Authenticator
from gateway.billing.disconnects import ReadToEnd
from gateway.billing.open_calls import CallLog, CallOpener
from gateway.billing.settler import Settler
from gateway.core.errors import GatewayError, InternalError, Overloaded, UpstreamCut, shutting_down
from gateway.diagnosis import PrefixDiagnosis
from gateway.endpoints.base import Endpoint
from gateway.endpoints.exchange import CLIENT_CLOSED_STATUS, Exchange
from gateway.endpoints.request_body import BodyBudget
from gateway.endpoints.stored_chats import store_chat
from gateway.endpoints.wire import STREAM_TYPE, ClientGone
from gateway.hooks.runner import HookRunner
from gateway.limits.limiter import UNLIMITED, Limiter
from gateway.mirroring import Mirroring
from gateway.policy.file import PolicyHolder
from gateway.prompts.canonicaliser import Canonicaliser, new_call_id
from gateway.prompts.reader import BodyReader
from gateway.queueing import Queue
from gateway.response_cache import UNRECORDED, Answer, LeaderFailed, ResponseCache
from gateway.routing.attempt_log import AttemptLog
from gateway.routing.router import Router
from gateway.routing.upstream import Upstream
from gateway.settlement import CallInFlight, Settlement
from gateway.telemetry import CallRecord, Telemetry
from gateway.types import Call, Outcome, PhaseTimings

log = logging.getLogger("warmpath")


@dataclass(frozen=True, slots=True)
class Components:
    """The long-lived parts that requests pass through. `gateway.server.composition` builds them once."""

    policies: PolicyHolder
    authenticator: Authenticator
    canonicaliser: Canonicaliser
    cache: ResponseCache
    limiter: Limiter
    queue: Queue
    router: Router
    call_log: CallLog
    settler: Settler
    telemetry: Telemetry
    diagnosis: PrefixDiagnosis
    mirroring: Mirroring
    hooks: HookRunner
    max_body_bytes: int
    bodies: BodyBudget

    def begin(self, call: Call, exchange: Exchange, record: CallRecord) -> CallInFlight:
        """Creates what belongs to this call alone. From here on, a disconnect of its client cancels its task."""
        if call.stored:
            store_chat(call, exchange, self.canonicaliser.response_store)
        opener = CallOpener(self.call_log, call, record.timings)
        attempts = AttemptLog(
            self.telemetry.new_span_id,
            lambda span: {"x-request-id": opener.request_id, **self.telemetry.outgoing(record.trace, span)},
            exchange.watch(),
            opener,
            now_ns=record.timings.now_ns,
        )
        read_to_end = ReadToEnd(call, exchange, attempts, opener)
        exchange.stay_while(read_to_end.wanted)
        return CallInFlight(
            call, exchange, record, attempts, opener, self.call_log, self.canonicaliser.media_calibration, read_to_end
        )


async def serve(
    components: Components, endpoint: BodyReader, exchange: Exchange, record: CallRecord, call_id: str
) -> None:
    """Answer one request. If that fails, releases everything that was reserved, and raises a `GatewayError`."""
    timings, policy = record.timings, components.policies.current

    timings.enter("authenticate")
    exchange.check_announced_body()
    principal = record.principal = await components.authenticator.authenticate(exchange.headers, policy)

    timings.enter("canonicalise")
    body = await exchange.body()
    if policy.hooks:
        body = await components.hooks.before(body, policy, exchange.path, call_id, principal)
    call = record.call = await components.canonicaliser.load_and_canonicalise(
        endpoint, body, exchange.headers, call_id=call_id, principal=principal, policy=policy,
        now=asyncio.get_running_loop().time(), trace=record.trace,
    )  # fmt: skip

    timings.enter("cache.lookup")
    flight = components.begin(call, exchange, record)
    found = await components.cache.lookup(call)
    if isinstance(found, Answer):
        record.cache = found.kind
        priced = call.model_name in policy.cache_prices
        admit, at_once = components.settler.admit, components.call_log.writes_at_once
        reservation = await admit(call, from_slices=at_once, from_cache=True) if priced else UNLIMITED
        timings.enter("chat")
        settlement = Settlement(flight, reservation, components.settler, from_cache=True)
        try:
            async with settlement, found:
                await relay(flight, found, settlement)
            return
        except LeaderFailed:
            found = UNRECORDED  # the followed call failed, so this one is sent itself
    record.cache = "off" if found is UNRECORDED else "miss"
    if found is not UNRECORDED:
        flight.read_to_end.unless(lambda: found.followed)
        found.when_abandoned(exchange.leave_if_gone)

    with found:
        timings.enter("admit")
        components.call_log.check()
        reservation = await components.settler.admit(call, from_slices=components.call_log.writes_at_once)
        exchange.reply_headers.update(reservation.headers)

        async with Settlement(flight, reservation, components.settler, found) as settlement:
            timings.enter("queue")
            with await components.queue.acquire_slot(call) as permit:
                timings.enter("route")
                async with components.router.open(call, permit, flight.attempts) as upstream:
                    settlement.answered_by(upstream)
                    timings.enter("chat")
                    if policy.hooks:
                        upstream = await components.hooks.after(call, upstream, settlement.bill_withheld)
                    await relay(flight, upstream, settlement)
            if call.model.mirror is not None:
                components.mirroring.offer(call, call.model.mirror, settlement.meter, timings)


async def relay(flight: CallInFlight, chunks: Upstream | Answer, settlement: Settlement) -> None:
    """Phase 7: pass the answer on as it arrives.

    The last bytes leave after the receipt is written. What the call holds is released right after them, so that a
    client can send its next request before the upstream connection is free.

    After the first chunk of a stream this task sleeps: `take` runs in the callback that received the bytes. The task
    wakes if the client is slower than the deployment, and at the end.
    """
    exchange = flight.exchange

    def take(chunk: bytes) -> bool:
        passed_on = watch(chunk)
        if meter.complete:
            exchange.put(passed_on, last=True)
            return False
        return not passed_on or exchange.put(passed_on)

    first = await chunks.first()
    settlement.answer_begins(chunks.api)
    meter, watch = settlement.meter, settlement.watcher()
    passed_on = watch(first)
    if flight.call.stream:
        kind = STREAM_TYPE if flight.call.passed is None else chunks.content_type
        await exchange.start(200, kind, settlement.reply_headers())
        await exchange.send(passed_on, last=meter.complete)
        while not meter.complete:
            ended = await chunks.stream_to(take, settlement.text_sink(take))
            await exchange.drained()
            if ended:
                break
    elif meter.complete:
        await exchange.reply(200, passed_on, chunks.content_type, settlement.reply_headers())
    if not meter.complete:
        raise UpstreamCut("the answer ended before its end")
    settlement.learn()
    await settlement.settle()


RequestHandler = Callable[[Components, BodyReader, Exchange, CallRecord, str], Coroutine[Any, Any, None]]


async def handle(
    components: Components,
    endpoint: Endpoint,
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    call_id: str | None = None,
    story: RequestHandler = serve,
) -> None:
    """Handle one request: run `story`, and turn whatever it raises into a reply, a log line and telemetry."""
    call_id = call_id or new_call_id()
    translator = endpoint.translator(call_id)
    exchange = Exchange(
        scope, receive, send, max_body_bytes=components.max_body_bytes, bodies=components.bodies, translator=translator
    )
    traced = scope["headers"] if b"traceparent" in exchange.headers else ()
    trace = components.telemetry.begin(traced, components.policies.current.tracing.sample)
    server_span_id = components.telemetry.new_span_id() if trace.sampled else 0
    record = CallRecord(
        call_id=call_id, trace=trace, server_span_id=server_span_id, timings=PhaseTimings(),
        method=exchange.method, path=exchange.path, operation=endpoint.operation,
    )  # fmt: skip
    exchange.reply_headers = {"x-request-id": call_id, "x-trace-id": "%032x" % trace.trace_id}  # noqa: UP031 (fast)
    try:
        error = await failure_of(story(components, translator or endpoint, exchange, record, call_id), call_id)
        if error is not None:
            record.error_code = error.code or error.type
            await exchange.refuse(error)
    except ClientGone:
        record.outcome = Outcome.CLIENT_GONE
    except asyncio.CancelledError:
        if not exchange.client_gone:
            record.error_code = Overloaded.code
            await exchange.refuse(shutting_down())
            raise
        record.outcome = record.outcome or Outcome.CLIENT_GONE
    finally:
        exchange.close()
        record.timings.end()
        record.status = exchange.status or CLIENT_CLOSED_STATUS
        components.telemetry.record(record)
        if record.call is not None and record.usage is not None:
            components.diagnosis.note(
                record.call, exchange.headers, record.usage, record.timings, record.deployment, record.attempts
            )


async def failure_of(served: Coroutine[Any, Any, None], call_id: str) -> GatewayError | None:
    """The error to send to the client, or None if the request was served. Raises `ClientGone`."""
    try:
        await served
    except GatewayError as error:
        return error
    except ClientGone:
        raise
    except Exception as bug:
        # A bug: the client gets no stack trace, and the log gets all of it.
        log.exception("a request failed in the gateway itself", extra={"call_id": call_id})
        return InternalError(f"an error in the gateway ({type(bug).__name__}); see its log")
    return None
