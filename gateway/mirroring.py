"""Mirrors a share of a model's calls to another deployment, and compares its answers with those that clients got.

A mirrored call is sent after its client has the whole answer, so it delays nothing. No tenant is billed for it: it has
no receipt and no reservation. It uses a slot that other calls leave free at the mirror's deployment, as a batch's call
does. If there is none, or if `max_in_flight` calls are being mirrored, the call is dropped and counted. If the mirror's
deployment fails, its circuit breaker does not open.

Metrics and the log say how the answers compare. No text of a prompt or an answer is in them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict

import msgspec

from gateway.billing.metering import Meter
from gateway.billing.native_metering import NativeMeter
from gateway.deployments.fleet import Fleet
from gateway.deployments.slot_permit import SlotPermit
from gateway.deployments.state import DeploymentState
from gateway.policy.deployments import Mirror
from gateway.providers.base import ProviderFailure
from gateway.providers.media_fetch.base import MediaSource
from gateway.types import Call, PhaseTimings, Usage

log = logging.getLogger("warmpath")

_SCALE = 16**8  # of the last eight hex digits of a call's id
BUSY, UNAVAILABLE, UNSUPPORTED, TIMEOUT, COMPARED = "busy", "unavailable", "unsupported", "timeout", "compared"


class ComparedAnswer(msgspec.Struct, frozen=True):
    """What is compared of an answer. `text` is its beginning, and `text_is_whole` says if it is all of it."""

    ttft_seconds: float
    seconds: float
    usage: Usage
    text: str
    text_is_whole: bool

    def has_text_of(self, other: ComparedAnswer) -> bool:
        """Whether the texts are equal, as far as both are known."""
        if self.text_is_whole and other.text_is_whole:
            return self.text == other.text
        return self.text.startswith(other.text) or other.text.startswith(self.text)


class MirrorTotals:
    """Counts of all mirrored calls of one model at one deployment, since the start."""

    def __init__(self) -> None:
        self.outcomes = Counter[str]()
        self.different = Counter[str]({"text": 0, "input": 0, "output": 0})
        self.seconds = {"client": 0.0, "mirror": 0.0}
        self.ttft_seconds = {"client": 0.0, "mirror": 0.0}
        self.tokens = {"client": 0, "mirror": 0}

    def add(self, client: ComparedAnswer, mirror: ComparedAnswer) -> None:
        """Count two complete answers to one call."""
        self.outcomes[COMPARED] += 1
        self.different["text"] += not client.has_text_of(mirror)
        self.different["input"] += client.usage.input != mirror.usage.input
        self.different["output"] += client.usage.output != mirror.usage.output
        for side, answer in (("client", client), ("mirror", mirror)):
            self.seconds[side] += answer.seconds
            self.ttft_seconds[side] += answer.ttft_seconds
            self.tokens[side] += answer.usage.output


class Mirroring:
    """Sends mirrored calls. One per gateway process; owned by the event loop."""

    def __init__(self, fleet: Fleet, media: MediaSource | None = None) -> None:
        self._fleet = fleet
        self._media = media
        self._in_flight = Counter[str]()  # by model
        self._tasks: set[asyncio.Task[None]] = set()  # bounded by the policy's `max_in_flight` of each model
        self.totals: defaultdict[tuple[str, str], MirrorTotals] = defaultdict(MirrorTotals)  # by model and deployment

    def offer(self, call: Call, mirror: Mirror, meter: Meter, timings: PhaseTimings) -> None:
        """Mirror a call whose answer is complete, if its share says so. Returns at once."""
        if int(call.id[-8:], 16) >= mirror.share * _SCALE:
            return
        totals = self.totals[call.model_name, mirror.deployment]
        taken = self._take_slot(call, mirror)
        if isinstance(taken, str):
            totals.outcomes[taken] += 1
            return
        deployment, permit = taken
        now_ns = timings.now_ns()
        client = ComparedAnswer(
            (timings.first_chunk_ns - timings.started_ns) / 1e9, (now_ns - timings.started_ns) / 1e9,
            meter.usage, meter.text_sample, meter.is_text_whole,
        )  # fmt: skip
        self._in_flight[call.model_name] += 1
        task = asyncio.create_task(self._run(call, deployment, permit, client, totals))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _take_slot(self, call: Call, mirror: Mirror) -> tuple[DeploymentState, SlotPermit] | str:
        """A slot at the mirror's deployment, or the reason why the call is dropped."""
        if self._in_flight[call.model_name] >= mirror.max_in_flight:
            return BUSY
        now = asyncio.get_running_loop().time()
        known = self._fleet.named(mirror.deployment)
        usable = [each for each in known if each.breaker.would_admit(now) and not each.breaker.open]
        if not usable:
            return UNAVAILABLE
        able = [each for each in usable if each.provider.unsupported_error(call) is None]
        if not able:
            return UNSUPPORTED
        free = [each for each in able if each.has_room_for_background(now)]
        if not free or (permit := self._fleet.take(free, now, background=True)) is None:
            return BUSY
        return next(each for each in free if permit.is_at(each)), permit

    async def _run(
        self, call: Call, deployment: DeploymentState, permit: SlotPermit, client: ComparedAnswer, totals: MirrorTotals
    ) -> None:
        outcome = COMPARED
        mirrored: ComparedAnswer | None = None
        try:
            with permit:
                async with asyncio.timeout(call.latency_class.total):
                    request = call
                    if call.media is not None and self._media is not None:
                        request = await self._media.with_data(call, deployment.provider.media_to_fetch(call))
                    mirrored = await _answer_of(request, deployment)
            totals.add(client, mirrored)
        except TimeoutError:
            outcome = TIMEOUT
        except ProviderFailure as failure:
            outcome = failure.outcome
        except Exception:
            outcome = "error"
            log.exception("mirroring a call failed in the gateway itself", extra={"call_id": call.id})
        finally:
            self._in_flight[call.model_name] -= 1
        if outcome != COMPARED:
            totals.outcomes[outcome] += 1
        _log(call, deployment, outcome, client, mirrored)

    async def close(self) -> None:
        """Cancel the calls in flight."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer_of(call: Call, deployment: DeploymentState) -> ComparedAnswer:
    """Send a call and read its whole answer. Raises `ProviderFailure`."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    sent = deployment.send(call, started, streams=call.stream)
    request = call if sent.cache_slot is None else msgspec.structs.replace(call, cache_slot=sent.cache_slot)
    first_at, answered = None, False
    try:
        response = await deployment.provider.open(request, headers={"x-request-id": f"{call.id}-mirror"})
        try:
            meter = Meter(call) if response.api is None else NativeMeter(call, response.api)
            meter.answered_by(deployment.config, deployment.token_rates)
            async for chunk in response:
                meter.watch(chunk)
                if first_at is None and (not call.stream or response.has_output(chunk)):
                    first_at = loop.time()
                    sent.first_chunk(first_at)
        finally:
            await response.aclose()
        answered = True
    finally:
        sent.end(loop.time(), answered=answered)
    # The engine has counted these tokens, so they belong to the comparison with its counters.
    deployment.add_billed(meter.usage)
    ended = loop.time()
    ttft_seconds = (ended if first_at is None else first_at) - started
    return ComparedAnswer(ttft_seconds, ended - started, meter.usage, meter.text_sample, meter.is_text_whole)


def _log(
    call: Call, deployment: DeploymentState, outcome: str, client: ComparedAnswer, mirrored: ComparedAnswer | None
) -> None:
    compared = {}
    if mirrored is not None:
        compared = {
            "equal_text": client.has_text_of(mirrored),
            "client_seconds": round(client.seconds, 4),
            "mirror_seconds": round(mirrored.seconds, 4),
            "client_ttft_seconds": round(client.ttft_seconds, 4),
            "mirror_ttft_seconds": round(mirrored.ttft_seconds, 4),
            "client_output_tokens": client.usage.output,
            "mirror_output_tokens": mirrored.usage.output,
        }
    details = {"call_id": call.id, "model": call.model_name, "deployment": deployment.name, "outcome": outcome}
    log.info("mirrored a call", extra={**details, **compared})
