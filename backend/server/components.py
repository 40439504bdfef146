"""Components that all endpoints share, the mapping of engine errors to HTTP errors, and `retry-after` estimates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from backend.engine.async_engine import AsyncEngine, OutputStream
from backend.engine.errors import ContextTooLong, EngineError, QueueFull, RequestRefused
from backend.engine.image_encoder import EncoderImage
from backend.engine.request import Request
from backend.layers.lora import LoraAdapter
from backend.server.adapters import ServedAdapters
from backend.server.errors import (
    ApiError,
    ContextLengthError,
    EngineDead,
    GrammarsBusy,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
)
from backend.server.kv_events import KVEventPublisher
from backend.server.kv_transfer import KvTransfer
from backend.server.messages import Message, image_parts
from backend.server.metrics import ServerMetrics
from backend.server.model import ServedModel
from backend.server.tenant_queue import QueueBounds, TenantQueue
from backend.server.tracing import Tracer
from backend.server.usage_records import UsageRecords

if TYPE_CHECKING:
    from backend.server.images import ImageLoader  # imports Pillow

# Bodies up to this size are rendered and tokenised on the event loop, which takes about half a millisecond at most.
# Larger ones are processed in a thread, so that streams of other requests do not stall.
MAX_INLINE_BYTES = 4096
# One thread for each tenant: a prompt of 4 MB takes one for 2 s, and the other one is for the prompts of others.
PREPARING = QueueBounds(running=2, running_per_tenant=1, waiting=4096, waiting_per_tenant=2048)
GRAMMARS = QueueBounds(running=4, running_per_tenant=2, waiting=256, waiting_per_tenant=64)
MAX_RETRY_AFTER_SECONDS = 120  # clients fail a request instead of waiting longer for a retry

T = TypeVar("T")


def _preparing_queue() -> TenantQueue:
    return TenantQueue(PREPARING, "tokenize", "requests wait to be tokenised")


def _grammar_queue() -> TenantQueue:
    # Compiling happens in processes (backend/engine/grammar_process.py), and these threads only wait for them.
    return TenantQueue(GRAMMARS, "grammar", "requests wait for their grammars to be compiled", GrammarsBusy)


@dataclass(frozen=True, slots=True)
class ServerComponents:
    """Long-lived objects of one server process, built by `backend.__main__.load`. Used on the event loop only."""

    model: ServedModel
    engine: AsyncEngine
    max_num_seqs: int
    max_waiting: int
    metrics: ServerMetrics
    tracer: Tracer
    usage_records: UsageRecords = field(default_factory=UsageRecords)
    preparing: TenantQueue = field(default_factory=_preparing_queue)
    grammar_queue: TenantQueue = field(default_factory=_grammar_queue)
    kv_events: KVEventPublisher | None = None
    prompt_tokens_details: bool = True  # report cached tokens in `usage`
    adapters: ServedAdapters | None = None
    updates_adapters: bool = False  # whether there are endpoints that load and unload adapters
    kv_transfer: KvTransfer | None = None
    images: ImageLoader | None = None  # None: the model reads text alone

    def check_model(self, name: str | None) -> LoraAdapter | None:
        """Returns the adapter of this name, or None if `name` is the served model or None. Raises ModelNotFound."""
        if name is None or name == self.model.name:
            return None
        if self.adapters and (adapter := self.adapters.store.get(name)):
            return adapter
        raise ModelNotFound(
            f"The model `{name}` does not exist; this server serves `{self.model.name}`.", param="model"
        )

    def name_of(self, adapter: LoraAdapter | None) -> str:
        """The model name in responses."""
        return adapter.name if adapter else self.model.name

    @property
    def max_sequences(self) -> int:
        """Maximum number of running and waiting sequences. The engine never accepts a request with more sequences."""
        return self.max_num_seqs + self.max_waiting

    async def load_images(self, messages: Sequence[Message], cache_salt: str | None) -> list[EncoderImage]:
        """Loads the images of a chat. Raises ApiError, and InvalidRequest if the model reads text alone."""
        if self.images:
            return await self.images.load(messages, cache_salt or "")
        for path, _ in image_parts(messages):
            raise InvalidRequest("This model does not read images.", param=path)
        return []

    async def prepare(self, cache_salt: str | None, size_bytes: int, work: Callable[[], T]) -> T:
        """Runs `work`, which renders and tokenises a prompt. If the body is large, in a thread in the tenant's turn."""
        return work() if size_bytes <= MAX_INLINE_BYTES else await self.preparing.run(cache_salt or "", work)

    def submit(self, request: Request) -> OutputStream:
        """Submits a request to the engine and returns its outputs. Raises ApiError if the engine rejects it."""
        try:
            return self.engine.submit(request)
        except EngineError as error:
            raise self._api_error(error) from error

    def _api_error(self, error: EngineError) -> ApiError:
        if isinstance(error, ContextTooLong):
            return ContextLengthError(error.message, param=error.param)
        if isinstance(error, RequestRefused):
            return InvalidRequest(error.message, param=error.param)
        if isinstance(error, QueueFull):
            return self.overloaded(error.message)
        return EngineDead(self.engine.error or error.message)

    def overloaded(self, message: str) -> Overloaded:
        """Counts a rejection and returns the 503 error, with an estimate for `retry-after`."""
        self.metrics.count_rejection()
        return Overloaded(message, retry_after_seconds=self._retry_after_seconds())

    def _retry_after_seconds(self) -> int:
        """Estimates the time until the engine has served the requests in the queue, in seconds."""
        rounds = 1 + self.engine.stats().num_waiting / self.max_num_seqs
        return min(MAX_RETRY_AFTER_SECONDS, max(1, math.ceil(rounds * self.metrics.mean_request_seconds)))
