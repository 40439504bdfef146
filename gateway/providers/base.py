"""The port to the servers behind the gateway: one dialect each, one reply at a time.

A provider turns a `Call` into one HTTP request and the reply into chunks: whole server-sent-event frames (one or
several, in order) where the call streams, and the one JSON body where it does not. They are in the OpenAI dialect,
which is also the doors' own: what a server of that dialect sends is passed on untouched, any other is translated.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol

from gateway.types import Call, TokenCounters


class Fault(enum.Enum):
    """Whose fault it was that a deployment gave no answer. The values stand in receipts, metrics and spans."""

    CONNECT = "connect_error"  # refused, unreachable, no TLS
    TIMEOUT = "timeout"  # connected, but no answer in time
    POOL = "pool_exhausted"  # our own bound on connections, not the server's fault
    STATUS = "status"  # 5xx, 408, 409, 429: another deployment may do better
    REFUSED = "refused"  # other 4xx: the request itself; no other deployment is asked
    CUT = "cut"  # the connection broke, or ended without the end of the answer
    MALFORMED = "malformed"  # not the dialect: not JSON, not event frames


class ProviderFailure(Exception):
    """A deployment gave no (further) answer. Raised by `open` and while iterating; nothing else is."""

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
        """`upstream_message` is the deployment's own error text. Only the client may see it: it may quote the prompt.
        `log_message` is the message without it.
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
"""Takes a chunk; False: no more for now. It must not wait, and what it raises ends the pouring."""


class UpstreamResponse(Protocol):
    """An opened answer with a good status; `anext` gives its chunks. Whoever opened it closes it.

    `aclose` closes the connection at once when the answer is not at its end, which is how an engine learns that
    nobody listens any more; it is safe to call twice, and after a cancellation.
    """

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes: ...

    async def stream_to(self, sink: Sink) -> bool:
        """Give `sink` the chunks that are still to come. True at the end of the answer, False when it wants no more.

        A provider that can do so calls `sink` in the very callback in which the bytes arrived: waking a task for
        every chunk costs more than everything else that is done with it. This way of doing it is right for all.
        """
        async for chunk in self:
            if not sink(chunk):
                return False
        return True

    async def aclose(self) -> None: ...


class Provider(Protocol):
    """One deployment, spoken to in its dialect. Lives as long as the policy that names it."""

    @property
    def has_usage_records(self) -> bool:
        """Whether `recorded_usage` can ever know something."""

    @property
    def continues_final_message(self) -> bool:
        """Whether it goes on in the middle of an answer where the last message is its beginning, and the body says so
        (`continue_final_message`)."""

    def unsupported_error(self, call: Call) -> ProviderFailure | None:
        """What the client is told if no server but such a one can be asked; None where it may be asked. By what can be
        seen at a glance: the operation, and top-level fields."""

    def render(self, call: Call) -> bytes:
        """The request body as this deployment gets it: its own model name, usage always asked for.

        Raises `ProviderFailure` where the call can not be said in its dialect.
        """

    async def open(self, call: Call, *, headers: Mapping[str, str]) -> UpstreamResponse:
        """Send the call; return as soon as a good status is in. `headers` carry the trace context and request id.

        Time limits are the caller's: it cancels. Cancelling closes the connection.
        """

    async def healthy(self) -> bool:
        """Whether the server answers its health or model endpoint with a good status, within a named bound."""

    async def recorded_usage(self, call_id: str) -> bytes | None:
        """What the server itself counted for a call whose answer ended early: an answer's JSON with its `usage`.

        None where it keeps no record, or does not tell within a named bound. Never raises.
        """

    async def count_prompt_tokens(self, call: Call) -> int | None:
        """How long the call's prompt is by the server's own tokenizer: for a call that ended early and of which there
        is no record. None as above.
        """

    async def token_counters(self) -> TokenCounters | None:
        """None as above."""


class OfflineProvider:
    """A provider for what only reasons about servers and sends nothing: asking it is a mistake of the program."""

    has_usage_records = False
    continues_final_message = False

    def unsupported_error(self, call: Call) -> ProviderFailure | None:
        return None

    def render(self, call: Call) -> bytes:
        raise AssertionError("nothing is sent here")

    async def open(self, call: Call, *, headers: Mapping[str, str]) -> UpstreamResponse:
        raise AssertionError("nothing is sent here")

    async def healthy(self) -> bool:
        return False

    async def recorded_usage(self, call_id: str) -> bytes | None:
        return None

    async def count_prompt_tokens(self, call: Call) -> int | None:
        return None

    async def token_counters(self) -> TokenCounters | None:
        return None
