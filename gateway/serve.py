"""The story of a request, from its first byte to its receipt. READ THIS FIRST.

Each line of `serve` is one phase: one span, one file. A phase hands its result to the next by value; what must be
given back on every way out (a reservation, a place, a connection) is held by the `async with` that took it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from gateway.auth.authenticator import Authenticator
from gateway.billing.open_calls import CallLog, CallOpener
from gateway.billing.settler import Settler
from gateway.core.errors import GatewayError, InternalError, Overloaded, UpstreamCut, shutting_down
from gateway.diagnosis import PrefixDiagnosis
from gateway.endpoints.base import Endpoint
from gateway.endpoints.exchange import CLIENT_CLOSED_STATUS, JSON_TYPE, STREAM_TYPE, BodyBudget, ClientGone, Exchange
from gateway.limits.limiter import UNLIMITED, Limiter
from gateway.policy.file import PolicyHolder
from gateway.prompts.canonicaliser import Canonicaliser, new_call_id
from gateway.prompts.reader import BodyReader
from gateway.queueing import Queue
from gateway.response_cache import UNRECORDED, Answer, LeaderFailed, ResponseCache
from gateway.routing.attempts import AttemptLog
from gateway.routing.router import Router
from gateway.routing.upstream import Upstream
from gateway.settlement import Settlement
from gateway.telemetry import CallRecord, Telemetry
from gateway.types import Call, Outcome, PhaseTimings

log = logging.getLogger("warmpath")


@dataclass(frozen=True, slots=True)
class Components:
    """The long-lived parts, one per phase. Built once, by `app`."""

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
    max_body_bytes: int
    bodies: BodyBudget


async def serve(
    components: Components, endpoint: BodyReader, exchange: Exchange, record: CallRecord, call_id: str
) -> None:
    """Answer one request. Raises what could not be answered; everything taken on the way has then been given back."""
    timings, policy = record.timings, components.policies.current

    timings.enter("authenticate")
    principal = record.principal = await components.authenticator.authenticate(exchange.headers, policy)

    timings.enter("canonicalise")
    body = await exchange.body()
    call = record.call = await components.canonicaliser.canonicalised(
        endpoint, body, exchange.headers, call_id=call_id, principal=principal, policy=policy,
        now=asyncio.get_running_loop().time(), trace=record.trace,
    )  # fmt: skip

    timings.enter("cache.lookup")
    task = exchange.watch()
    found = await components.cache.lookup(call)
    opener = CallOpener(components.call_log, call, timings)
    attempts = AttemptLog(
        components.telemetry.new_span_id,
        lambda span: {"x-request-id": opener.request_id, **components.telemetry.outgoing(record.trace, span)},
        task,
        opener,
        now_ns=timings.now_ns,
    )
    if isinstance(found, Answer):
        record.cache = found.kind
        priced = call.model.name in policy.cache_prices
        reservation = await components.settler.admit(call, from_cache=True) if priced else UNLIMITED
        timings.enter("chat")
        account = Settlement(
            call, reservation, UNRECORDED, attempts, exchange, record, components.call_log, components.settler, opener,
            from_cache=True,
        )  # fmt: skip
        try:
            async with account, found:
                await relay(call, found, account, exchange)
            return
        except LeaderFailed:
            found = UNRECORDED  # it asks for itself
    record.cache = "off" if found is UNRECORDED else "miss"
    if found is not UNRECORDED:
        exchange.stay_while(lambda: found.followed)
        found.when_abandoned(exchange.leave_if_gone)

    with found:
        timings.enter("admit")
        components.call_log.check()
        reservation = await components.settler.admit(call)
        exchange.reply_headers.update(reservation.headers)

        async with Settlement(
            call, reservation, found, attempts, exchange, record, components.call_log, components.settler, opener
        ) as account:
            timings.enter("queue")
            with await components.queue.acquire_slot(call) as permit:
                timings.enter("route")
                async with components.router.open(call, permit, attempts) as upstream:
                    account.answered_by(upstream)
                    timings.enter("chat")
                    await relay(call, upstream, account, exchange)


async def relay(call: Call, chunks: Upstream | Answer, account: Settlement, exchange: Exchange) -> None:
    """Phase 7: pass the answer on as it comes. Its last bytes go out after its receipt is written, and what was held
    for it is given back right behind them: the client may ask again before the server's connection is free.

    Behind the first chunk of a stream this task sleeps: `take` runs where the bytes arrive. It is woken when the
    client is slower than the server, and at the end.
    """
    meter, watch = account.meter, account.watcher()

    def take(chunk: bytes) -> bool:
        passed_on = watch(chunk)
        if meter.complete:
            exchange.put(passed_on, last=True)
            return False
        return not passed_on or exchange.put(passed_on)

    first = await chunks.first()
    account.answer_begins()
    passed_on = watch(first)
    if call.stream:
        await exchange.start(200, STREAM_TYPE, account.reply_headers())
        await exchange.send(passed_on, last=meter.complete)
        while not meter.complete:
            ended = await chunks.stream_to(take)
            await exchange.drained()
            if ended:
                break
    elif meter.complete:
        await exchange.reply(200, passed_on, JSON_TYPE, account.reply_headers())
    if not meter.complete:
        raise UpstreamCut("the answer ended before its end")
    await account.settle()


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
    """The border of a story: whatever it raises becomes a truthful reply, a line in the log, and telemetry."""
    call_id = call_id or new_call_id()
    translator = endpoint.translator(call_id)
    exchange = Exchange(
        scope, receive, send, max_body_bytes=components.max_body_bytes, bodies=components.bodies, translator=translator
    )
    traced = scope["headers"] if b"traceparent" in exchange.headers else ()
    trace = components.telemetry.begin(traced, components.policies.current.tracing.sample)
    record = CallRecord(
        call_id=call_id, trace=trace, server_span_id=components.telemetry.new_span_id(), timings=PhaseTimings(),
        method=exchange.method, path=exchange.path, operation=endpoint.operation,
    )  # fmt: skip
    exchange.reply_headers = {"x-request-id": call_id, "x-trace-id": f"{trace.trace_id:032x}"}
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
    """What a client is to be told of a request that could not be served; None of one that was."""
    try:
        await served
    except GatewayError as error:
        return error
    except ClientGone:
        raise
    except Exception as bug:
        # The last line of defence: no stack trace leaves, and none is lost.
        log.exception("a request failed in the gateway itself", extra={"call_id": call_id})
        return InternalError(f"an error in the gateway ({type(bug).__name__}); see its log")
    return None
