"""Interface of a provider: must send a call to one deployment over HTTP, and return the answer in OpenAI's format.

A provider converts a `Call` to one HTTP request, and the HTTP response to chunks. If the call streams, a chunk is one
or more complete server-sent-event frames. Otherwise the only chunk is the JSON body. Chunks are in OpenAI's format,
which all endpoints expect. The bytes of an OpenAI-compatible deployment pass unchanged. Other formats are translated.

Minimal path 7 of 7.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol

from gateway.providers.sse import ends_stream, has_output
from gateway.providers.text_events import TextSink
from gateway.types import Call, TokenCounters


class Fault(enum.Enum):
    """Why a deployment gave no complete answer. Receipts, metrics and spans contain the values."""

    CONNECT = "connect_error"  # connection refused, host unreachable, TLS failed
    TIMEOUT = "timeout"  # connected, but no answer in time
    SILENT = "silent"  # connected, but no answer within the attempt's share of the time
    POOL = "pool_exhausted"  # the gateway's own connection limit was reached; not the deployment's fault
    STATUS = "status"  # 5xx, 408, 409, 429: a retry on another deployment may succeed
    SETUP = "setup"  # 401, 402, 403, 404: the gateway's key, path or model name is wrong, not the request
    UNSUPPORTED = "unsupported"  # 501, or "not supported": this deployment cannot serve requests of this kind
    REFUSED = "refused"  # other 4xx: the request is invalid, so it is not retried
    CUT = "cut"  # the connection broke, or the stream ended without its end marker
    MALFORMED = "malformed"  # the response does not have the API's format: not JSON, or not event frames


class ProviderFailure(Exception):
    """A deployment gave no answer, or its answer was cut. `Provider.open` and its response raise nothing else."""

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
        reason: str = "",
    ) -> None:
        """`status`, `body` and `content_type` describe the upstream response, which may be passed on to the client.

        `upstream_message` is the deployment's own error text. Only the client may see it, because it may quote the
        prompt. `log_message` is `message` without that text. `reason` says why the deployment rejected the request:
        "context" if the prompt is too long, "refused_content" if its content filter did, else empty.
        """
        super().__init__(message)
        self.log_message = log_message or message
        self.upstream_message = upstream_message
        self.fault = fault
        self.reason = reason
        self.status = status
        self.body = body
        self.content_type = content_type
        self.retry_after_seconds = retry_after_seconds

    @property
    def outcome(self) -> str:
        """The failure's name in receipts and metrics: its status if it has one that explains it, else its fault."""
        by_status = self.fault in (Fault.STATUS, Fault.SETUP, Fault.UNSUPPORTED)
        return f"status_{self.status}" if by_status else self.fault.value


Sink = Callable[[bytes], bool]
"""Receives a chunk, and returns whether it accepts more now. Must not block. Its exceptions end `stream_to`."""


class UpstreamResponse(Protocol):
    """An open response with a success status. `anext` returns its chunks. The caller must close the response.
    If `aclose` is called before the end, it closes the connection at once, so the engine notices the disconnect.
    `aclose` is idempotent, and safe after a cancellation.
    """

    content_type: str = "application/json"  # of an answer that does not stream
    api: str | None = None  # the client's API format, if the chunks have it; None: OpenAI's chat format

    def has_output(self, frames: bytes) -> bool:
        """Whether frames of the stream contain output for the client (`gateway.providers.sse.has_output`)."""
        return has_output(frames)

    def ends_stream(self, frames: bytes) -> bool:
        """Whether frames that were returned last end the stream."""
        return ends_stream(frames)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes: ...

    async def stream_to(self, sink: Sink, text_sink: TextSink | None = None) -> bool:
        """Pass the remaining chunks to `sink`, or to `text_sink` those that it is meant for.

        Returns True at the end of the response, and False if a sink accepts no more. May call the sinks in the callback
        that received the bytes, since waking a task for each chunk costs more than all other work on the chunk.
        """
        async for chunk in self:
            if not sink(chunk):
                return False
        return True

    async def aclose(self) -> None: ...


class Provider(Protocol):
    """Sends calls to one deployment in the deployment's API. Exists as long as the policy that configures it.

    Methods that return None if the deployment does not answer never raise an exception, and take a bounded time.
    """

    @property
    def has_usage_records(self) -> bool:
        """Whether the deployment keeps usage records, which `recorded_usage` returns."""

    @property
    def continues_final_message(self) -> bool:
        """Whether the deployment supports `continue_final_message`, to continue an answer begun in the last message."""

    def unsupported_error(self, call: Call) -> ProviderFailure | None:
        """Return an error if the deployment's API cannot express the call, else None.

        Checks only the operation and the top-level fields, so `render` may still fail. The router skips a deployment
        that returns an error. The client gets the error if no other deployment is left.
        """

    def media_to_fetch(self, call: Call) -> frozenset[str]:
        """Return the types of content parts whose URLs the deployment does not take, although it takes their data."""

    def render(self, call: Call) -> bytes:
        """Return the body of the upstream request, with the deployment's own model name and a request for usage.

        Raises `ProviderFailure` if the deployment's API cannot express the call.
        """

    async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
        """Send the call, and return when a success status has arrived. `headers` are the trace context and request id.

        `body` is what `render` returned, if it was called before: for a large call, in the worker thread.
        There is no timeout, so the caller must cancel. Cancellation closes the connection. Raises `ProviderFailure`.
        """

    async def healthy(self) -> bool:
        """Whether the deployment's health or model endpoint returns a success status within the timeout."""

    async def recorded_usage(self, call_id: str, *, patient: bool = False) -> bytes | None:
        """Return the deployment's own record of a call that ended early, as the JSON of an answer with its `usage`.

        A busy deployment writes its record late. `patient` waits longer for it, if no client waits meanwhile.
        Returns None if the deployment keeps no records or does not answer.
        """

    async def count_prompt_tokens(self, call: Call) -> int | None:
        """Count the tokens of a call's prompt with the deployment's tokenizer. Returns None if there is no reply.

        Used by the token counting endpoints, and to bill a call that ended early and has no usage record.
        """

    async def count_text_tokens(self, text: str) -> int | None:
        """Count the tokens of generated text, to bill an answer that ended early. Returns None if there is no reply."""

    async def token_counters(self) -> TokenCounters | None:
        """Return the deployment's total token counters, for reconciliation. None if it has none or does not answer."""
