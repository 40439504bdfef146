"""An opened reply: from its first chunk on there is no other server to ask, so a failure is told in the stream."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.core.errors import UpstreamCut
from gateway.core.timers import WaitBound
from gateway.deployments.fleet import SentCall
from gateway.deployments.quarantine import Quarantine
from gateway.providers.base import Fault, ProviderFailure, Sink, UpstreamResponse
from gateway.routing.base import Candidate
from gateway.routing.quarantine_checks import clear_after_completion, record_cut_answer
from gateway.types import Call


class Upstream:
    """An opened reply with its first chunk in hand. Breaks with `UpstreamCut`."""

    def __init__(
        self,
        call: Call,
        chosen: Candidate,
        sent: SentCall,
        reply: UpstreamResponse,
        first: bytes,
        task: asyncio.Task[Any] | None,
        quarantine: Quarantine,
    ) -> None:
        self.reply = reply
        self.sent = sent
        self.chosen = chosen
        self.deployment = chosen.deployment
        self.matched_tokens = chosen.matched_tokens
        self.first_chunk_bytes = first
        self.fault: Fault | None = None  # why it broke, once it has
        self.caused_crash = False  # the server, and this call is why
        self._call = call
        self._task = task
        self._quarantine = quarantine
        self._wait: WaitBound | None = None

    async def first(self) -> bytes:
        return self.first_chunk_bytes

    @property
    def is_estimated(self) -> bool:
        """Whether what it counts is not the engines' own count alone."""
        return False

    def merge_usage(self, record: bytes) -> bytes:
        """An engine's record of the call, as the usage of all that came from here."""
        return record

    async def stream_to(self, sink: Sink) -> bool:
        """Give `sink` the chunks after the first. Each must arrive within the class's inter-token time of the last."""
        if self._wait is None:
            limits = self._call.latency_class
            inter_token = min(limits.inter_token, self._call.read_timeout_seconds)
            self._wait = WaitBound(inter_token, self._call.deadline, task=self._task)
        wait, now = self._wait, asyncio.get_running_loop().time

        def taking(chunk: bytes) -> bool:
            wait.since = now()  # one wait ends, and the next begins
            return sink(chunk)

        wait.begin()
        try:
            return await self.reply.stream_to(taking)
        except ProviderFailure as failure:
            wait.end()
            self._record_broken_stream(failure.fault, failure.log_message, now())
            if failure.fault is Fault.CUT:
                self.deployment.record_cut(now())
                self.caused_crash = await record_cut_answer(self._quarantine, self.deployment, self._call)
            raise UpstreamCut(f"{self.deployment.name}: {failure}") from None
        except asyncio.CancelledError:
            if not wait.expired:
                raise
            silent_seconds = 0.0 if wait.since is None else now() - wait.since
            wait.uncancel()
            self.fault = Fault.TIMEOUT
            if silent_seconds < wait.seconds:
                raise UpstreamCut(f"{self.deployment.name} was still answering when the call's time was over") from None
            if silent_seconds >= self._call.latency_class.inter_token:  # else it is the client that waits no longer
                self._record_broken_stream(Fault.TIMEOUT, f"nothing more came for {silent_seconds:.1f} s", now())
            raise UpstreamCut(f"{self.deployment.name} sent nothing for {wait.seconds:g} s") from None
        finally:
            wait.end()

    def _record_broken_stream(self, fault: Fault, why: str, now: float) -> None:
        self.fault = fault
        self.deployment.failures.failed(fault.value, f"in the middle of an answer: {why}", self._call.id, now)
        self.deployment.breaker.answer_broken(now)
        self.deployment.failures.breaker_changed(self.deployment.breaker.open, now)

    def completed(self) -> None:
        """The answer has come to its own end."""
        self.deployment.breaker.completed()
        clear_after_completion(self._quarantine, self._call)

    async def aclose(self) -> None:
        """The call is over at this server. Once."""
        if self._wait is not None:
            self._wait.close()
        await self._leave()

    async def _leave(self) -> None:
        self.sent.end(asyncio.get_running_loop().time())
        await self.reply.aclose()
