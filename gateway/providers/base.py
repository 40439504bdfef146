"""The port to deployments: one dialect each, one response at a time.

A provider turns a `Call` into one HTTP request, and the HTTP response into chunks: whole server-sent-event frames (one
or several, in order) if the call streams, otherwise one JSON body. Chunks are in OpenAI's dialect, which all endpoints
use. If a deployment speaks that dialect, its bytes pass untouched; any other dialect is translated.

Minimal path 7 of 7.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol

from gateway.types import Call, TokenCounters


class Fault(enum.Enum):
    """Why a deployment gave no answer. Receipts, metrics and spans contain the values."""

    CONNECT = "connect_error"  # connection refused, host unreachable, TLS failed
    TIMEOUT = "timeout"  # connected, but no answer in time
    POOL = "pool_exhausted"  # our own bound on connections; not the deployment's fault
    STATUS = "status"  # 5xx, 408, 409, 429: a retry on another deployment may succeed
    REFUSED = "refused"  # other 4xx: the request is at fault, so it is not retried
    CUT = "cut"  # the connection broke, or the stream ended without its end marker
    MALFORMED = "malformed"  # not the dialect: not JSON, or not event frames


class ProviderFailure(Exception):
    """A deployment gave no answer, or cut it. The only exception that `Provider.open` and `UpstreamResponse` raise."""

    def __init__(
        self,
        fault: Fault,
        message: str,
        *,
        status: int | None = None,
        body: bytes = b"",
        content_type: str = "application/json",
        retry_after_seconds: float | None = None,
        log_message: str | None = None,
        upstream_message: str = "",
    ) -> None:
        """`status`, `body` and `content_type` are those of the upstream response, for a client that gets it passed on.

        `upstream_message` is the deployment's own error text, for the client only: it may quote the prompt.
        `log_message` is `message` without that text.
        """
        super().__init__(message)
        self.log_message = log_message or message
        self.upstream_message = upstream_message
        self.fault = fault
        self.status = status
        self.body = body
        self.content_type = content_type
        self.retry_after_seconds = retry_after_seconds


Sink = Callable[[bytes], bool]
"""Takes a chunk and returns whether it wants more now. Must not block. Its exceptions end `stream_to`."""


class UpstreamResponse(Protocol):
    """An open response with a success status. `anext` returns its chunks. The caller that opened it closes it.

    `aclose` before the end closes the connection at once, which tells the engine that the client disconnected. It is
    idempotent, and safe after a cancellation.
    """

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes: ...

    async def stream_to(self, sink: Sink) -> bool:
        """Pass the remaining chunks to `sink`. True at the end of the response, False if `sink` wants no more.

        Providers may call `sink` in the very callback that received the bytes: waking a task for each chunk costs more
        than everything else done with it. This default implementation is correct for every provider.
        """
        async for chunk in self:
            if not sink(chunk):
                return False
        return True

    async def aclose(self) -> None: ...


class Provider(Protocol):
    """One deployment, addressed in its dialect. Lives as long as the policy that configures it.

    The methods that return None if the deployment does not answer never raise, and take a bounded time.
    """

    @property
    def has_usage_records(self) -> bool:
        """Whether `recorded_usage` can return anything but None."""

    @property
    def continues_final_message(self) -> bool:
        """Whether it supports `continue_final_message`: to continue an answer that the last message starts."""

    def unsupported_error(self, call: Call) -> ProviderFailure | None:
        """The error for a call that the dialect cannot express; None if it can.

        Checks the operation and the top-level fields only, so `render` may still fail. The router skips such
        deployments. The client gets the error if no other deployment is left.
        """

    def render(self, call: Call) -> bytes:
        """The body of the upstream request: with the deployment's own model name, and with usage requested.

        Raises `ProviderFailure` if the dialect cannot express the call.
        """

    async def open(self, call: Call, *, headers: Mapping[str, str]) -> UpstreamResponse:
        """Send the call and return once a success status has arrived. `headers` are the trace context and request id.

        Sets no timeout: the caller cancels. Cancellation closes the connection. Raises `ProviderFailure`.
        """

    async def healthy(self) -> bool:
        """Whether the deployment's health or model endpoint answers with a success status in time."""

    async def recorded_usage(self, call_id: str) -> bytes | None:
        """The deployment's own record of a call that ended early: the JSON of an answer, with its `usage`.

        None if it keeps no records, or does not answer.
        """

    async def count_prompt_tokens(self, call: Call) -> int | None:
        """The length of the call's prompt by the deployment's tokenizer. None if it does not answer.

        Used for token counting, and for a call that ended early and has no record.
        """

    async def token_counters(self) -> TokenCounters | None:
        """The deployment's total token counters, for reconciliation. None if it has none, or does not answer."""


class OfflineProvider:
    """A provider for programs that only model deployments: it sends nothing. `render` and `open` raise."""

    has_usage_records = False
    continues_final_message = False

    def unsupported_error(self, call: Call) -> ProviderFailure | None:
        return None

    def render(self, call: Call) -> bytes:
        raise AssertionError("an offline provider sends nothing")

    async def open(self, call: Call, *, headers: Mapping[str, str]) -> UpstreamResponse:
        raise AssertionError("an offline provider sends nothing")

    async def healthy(self) -> bool:
        return False

    async def recorded_usage(self, call_id: str) -> bytes | None:
        return None

    async def count_prompt_tokens(self, call: Call) -> int | None:
        return None

    async def token_counters(self) -> TokenCounters | None:
        return None
