"""Port of the endpoints: each one accepts one wire format at one path.

Inside the gateway there is one format, OpenAI's for chat, completions and embeddings: in a `Call`'s fields, in the
chunks of an answer, and in errors. An endpoint with another wire format gives each exchange a `Translator`, which reads
the request body into that format and rewrites what is sent to the client. `gateway/endpoints/exchange.py` calls the
translator; no other phase knows about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from gateway.core.errors import GatewayError
from gateway.prompts.reader import BodyReader
from gateway.types import Operation


class Translator(BodyReader, Protocol):
    """Translates one exchange between the client's wire format and OpenAI's.

    It holds the state of its exchange, and is not shared between tasks. `read` is called before any part of the reply.
    Then the exchange passes each part of the reply exactly once, in order, right before sending it: a JSON reply to
    `answer`, a stream to `frames`. Neither is called after `error_response` or `error_frames`.

    `answer` and `frames` raise `UpstreamCut` if a deployment's answer cannot be expressed in the client's format. The
    client then gets that error like any other.
    """

    def headers(self, named: Mapping[str, str]) -> Mapping[str, str]:
        """Return headers to add to the reply, which already has the headers `named`."""

    def answer(self, body: bytes) -> bytes:
        """Translate a complete JSON answer."""

    def frames(self, chunk: bytes, *, last: bool) -> bytes:
        """Translate complete SSE frames. Returns b"" if the client gets nothing for them.

        `last` is true for the frames that end the answer, `[DONE]` among them. Only then may the result contain the end
        marker of the client's format: without it, a client must see that its stream was cut.
        """

    def error_response(self, error: GatewayError) -> tuple[int, bytes] | None:
        """Return the status and body for an error before the first byte, or None to use OpenAI's error object."""

    def error_frames(self, error: GatewayError) -> bytes:
        """Return the frames for an error after the first byte. No client may mistake them for the answer's end."""


class Endpoint(BodyReader, Protocol):
    """One endpoint of the API. Stateless, and shared by all requests to its path."""

    path: ClassVar[str]  # behind /v1/
    operation: ClassVar[Operation]

    def translator(self, call_id: str) -> Translator | None:
        """Return a translator for one exchange, or None if the wire format is OpenAI's and bytes pass unchanged.

        `call_id` is the exchange's request id.
        """


class NativeEndpoint:
    """Base of endpoints whose wire format is OpenAI's: replies pass unchanged, at the deployments' own path."""

    def translator(self, call_id: str) -> None:
        return None
