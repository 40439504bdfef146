"""Streams an upstream response after its first chunk, under the latency class's time limits.

The client receives the first chunk at once, so no other deployment can answer from then on. A later failure is an
`UpstreamCut`, which is reported in the stream. `resuming.py` extends this class for streams that may be resumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.core.errors import UpstreamCut
from gateway.core.timers import WaitBound
from gateway.deployments.evidence import Quarantine
from gateway.deployments.sent_call import SentCall
from gateway.providers.base import Fault, ProviderFailure, Sink, UpstreamResponse
from gateway.providers.sse import count_events
from gateway.providers.text_events import TextSink
from gateway.routing.attempt_log import AttemptLog
from gateway.routing.base import Candidate
from gateway.routing.blame import record_broken_stream, record_completion
from gateway.types import Call


class Upstream:
    """An open upstream response whose first chunk has arrived.

    `stream_to` raises `UpstreamCut` if the response breaks.
    """

    def __init__(
        self,
        call: Call,
        chosen: Candidate,
        sent: SentCall,
        response: UpstreamResponse,
        first: bytes,
        attempts: AttemptLog,
        quarantine: Quarantine,
    ) -> None:
        self.response = response
        self.content_type = response.content_type  # of an answer that does not stream
        self.api = response.api  # the client's API format, if the chunks have it; None if they are translated
        self.sent = sent
        self.chosen = chosen
        self.deployment = chosen.deployment
        self.matched_tokens = chosen.matched_tokens
        self.first_chunk_bytes = first
        self.on_released: Callable[[Upstream], None] | None = None  # called when the call has left the deployment
        self.fault: Fault | None = None  # why the stream broke; None if it did not
        self.caused_crash = False  # True if the deployment crashed during this call
        self._call = call
        self._task = attempts.task
        self._loop = attempts.loop
        self._quarantine = quarantine
        self._wait: WaitBound | None = None
        self._began_at = self._loop.time()

    async def first(self) -> bytes:
        """The first chunk: the response's beginning, up to and including its first output."""
        return self.first_chunk_bytes

    @property
    def is_estimated(self) -> bool:
        """Whether the usage is partly an estimate of the gateway, although an engine counted the rest."""
        return False

    def merge_usage(self, record: bytes) -> bytes:
        """An engine's usage record of this call, extended to everything that the client received."""
        return record

    async def stream_to(self, sink: Sink, text_sink: TextSink | None = None) -> bool:
        """Give `sink` the chunks after the first. Each must arrive within the class's inter-token time of the last.

        `text_sink` gets those that it is meant for, if the provider knows them. Returns True at the response's end, and
        False if a sink wants no more for now; then it may be called again.
        """
        if self._wait is None:
            limits = self._call.latency_class
            inter_token = min(limits.inter_token, self._call.read_timeout_seconds)
            self._wait = WaitBound(inter_token, self._call.deadline, task=self._task)
        wait, now = self._wait, self._loop.time

        def timed_sink(chunk: bytes) -> bool:
            if not chunk.startswith(b":") or count_events(chunk):  # comments are no progress
                wait.since = now()  # the wait for the next chunk begins
            return sink(chunk)

        def timed_text_sink(chunk: bytes, events: int) -> bool:
            assert text_sink is not None
            wait.since = now()
            return text_sink.take(chunk, events)

        timed_text = None
        if text_sink is not None:
            timed_text = TextSink(timed_text_sink, direct := text_sink.direct)
            if direct is not None:
                direct.wait, direct.now = wait, now
        wait.begin()
        try:
            return await self.response.stream_to(timed_sink, timed_text)
        except ProviderFailure as failure:
            wait.end()
            await self._broken(failure)
            raise UpstreamCut(f"{self.deployment.name}: {failure}") from None
        except asyncio.CancelledError:
            if not wait.expired:
                raise
            silent_seconds = 0.0 if wait.since is None else now() - wait.since
            wait.uncancel()  # the wait's own time limit cancelled the task
            self.fault = Fault.TIMEOUT
            if silent_seconds < wait.seconds:
                raise UpstreamCut(
                    f"{self.deployment.name} was still streaming when the request's time limit was reached"
                ) from None
            # If the client's own read timeout was shorter than the class's, the deployment is not at fault.
            if silent_seconds >= self._call.latency_class.inter_token:
                await self._broken(ProviderFailure(Fault.TIMEOUT, f"no data for {silent_seconds:.1f} s"))
            raise UpstreamCut(f"{self.deployment.name} sent nothing for {wait.seconds:g} s") from None
        finally:
            wait.end()

    async def _broken(self, failure: ProviderFailure) -> None:
        self.fault = failure.fault
        self.caused_crash = await record_broken_stream(
            self._quarantine, self.deployment, self._call, failure, self._began_at
        )

    def completed(self) -> None:
        """The response is complete: trust the deployment again and forget the request's crashes."""
        record_completion(self._quarantine, self.deployment, self._call, self._loop.time())

    async def aclose(self) -> None:
        """End the call at this deployment and close the response. Call it once."""
        if self._wait is not None:
            self._wait.close()
        await self._release()

    async def _release(self) -> None:
        self.sent.end(self._loop.time())
        if self.on_released is not None:
            self.on_released(self)
        await self.response.aclose()
