"""What all doors share: the model, the engine behind it, and how the engine's refusals read on the wire."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from backend.engine.async_engine import AsyncEngine
from backend.engine.errors import ContextTooLong, EngineError, QueueFull, RequestRefused
from backend.engine.request import Request, StepOutput
from backend.server.errors import ApiError, ContextLengthError, EngineDead, InvalidRequest, ModelNotFound, Overloaded
from backend.server.kv_events import KVEventPublisher
from backend.server.metrics import ServerMetrics
from backend.server.model import ServedModel
from backend.server.tracing import Tracer
from backend.server.usage_records import UsageRecords

# Up to this size a body is rendered and tokenised on the event loop: about half a millisecond at most. Above it, in a
# thread, so that no stream waits for somebody's long prompt.
MAX_INLINE_BYTES = 4096
MAX_RETRY_AFTER_SECONDS = 120  # clients do not wait longer than this for a retry, they give up

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerComponents:
    model: ServedModel
    engine: AsyncEngine
    max_num_seqs: int
    max_waiting: int
    metrics: ServerMetrics
    tracer: Tracer
    executor: ThreadPoolExecutor
    usage_records: UsageRecords = field(default_factory=UsageRecords)
    kv_events: KVEventPublisher | None = None

    def check_model(self, name: str | None) -> None:
        """A request that names none asks for the one that there is."""
        if name is not None and name != self.model.name:
            raise ModelNotFound(
                f"The model `{name}` does not exist; this server has `{self.model.name}`.", param="model"
            )

    @property
    def max_sequences(self) -> int:
        """How many the engine can have at once: a request for more could never be taken."""
        return self.max_num_seqs + self.max_waiting

    async def prepare(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Runs `work`, which renders and tokenises, where it holds nobody up. `size_bytes`: of the request's body."""
        return work() if size_bytes <= MAX_INLINE_BYTES else await self.in_thread(work)

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.executor, work)

    def submit(self, request: Request) -> AsyncIterator[StepOutput]:
        """Raises the ApiError that tells the client why the engine did not take the request."""
        try:
            return self.engine.submit(request)
        except EngineError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: EngineError) -> ApiError:
        if isinstance(error, ContextTooLong):
            return ContextLengthError(error.message, param=error.param)
        if isinstance(error, RequestRefused):
            return InvalidRequest(error.message, param=error.param)
        if isinstance(error, QueueFull):
            return self.overloaded(error.message)
        return EngineDead(self.engine.error or error.message)

    def overloaded(self, message: str) -> Overloaded:
        self.metrics.rejected()
        return Overloaded(message, retry_after_seconds=self._retry_after_seconds())

    def _retry_after_seconds(self) -> int:
        """About how long those who wait already will take."""
        rounds = 1 + self.engine.stats().num_waiting / self.max_num_seqs
        return min(MAX_RETRY_AFTER_SECONDS, max(1, math.ceil(rounds * self.metrics.mean_request_seconds)))
