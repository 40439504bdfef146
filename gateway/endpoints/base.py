"""Interface of the endpoints: an endpoint must read the requests that clients send to one path, in one API format.

Inside the gateway, requests, answers and errors have OpenAI's format for chat, completions and embeddings. An endpoint
with another API format creates a `Translator` for each exchange (one request and its reply). The translator converts
the request body to OpenAI's format, and the reply to the client's format. Only `gateway/endpoints/exchange.py` calls
the translator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from gateway.core.errors import GatewayError
from gateway.prompts.reader import BodyReader
from gateway.types import Operation


class ReplyTranslator(Protocol):
    """Translates one reply from OpenAI's format to the client's. See `Translator`."""

    def headers(self, named: Mapping[str, str]) -> Mapping[str, str]:
        """Return the headers to add to the reply. `named` are the headers that the reply already has."""

    def pass_answer(self) -> None:
        """The answer has the client's format: `answer` and `frames` get it in that format, and return it unchanged.

        Called before the first of them.
        """

    def answer(self, body: bytes) -> bytes:
        """Translate a complete JSON answer."""

    def frames(self, chunk: bytes, *, last: bool) -> bytes:
        """Translate complete SSE frames. Returns b"" if nothing is sent to the client for these frames.

        `last` is true for the frames that end the answer, including `[DONE]`. The result may contain the end marker of
        the client's format only if `last` is true. A stream without the end marker tells the client that it was cut.
        """

    def error_response(self, error: GatewayError) -> tuple[int, bytes] | None:
        """Return the status and body of an error reply, or None to send OpenAI's error object.

        Called only if no byte of the reply has been sent.
        """

    def error_frames(self, error: GatewayError) -> bytes:
        """Return the frames that report an error in a stream that has begun.

        A client must not be able to mistake these frames for the normal end of the answer.
        """


class Translator(BodyReader, ReplyTranslator, Protocol):
    """Translates one request and its reply between the client's API format and OpenAI's format.

    A translator keeps the state of one exchange and is not shared between tasks. `read` is called before any part of
    the reply. The `Exchange` then passes each part of the reply exactly once, in order, right before sending it. A
    JSON reply goes to `answer`, and a stream goes to `frames`. Neither is called after `error_response` or
    `error_frames`.

    `answer` and `frames` raise `UpstreamCut` if a deployment's answer cannot be expressed in the client's format. The
    client then gets an error reply.
    """


class Endpoint(BodyReader, Protocol):
    """One endpoint of the API. An endpoint is stateless and shared by all requests to its path."""

    path: ClassVar[str]  # the path after /v1/
    operation: ClassVar[Operation]

    def translator(self, call_id: str) -> Translator | None:
        """Return a translator for one exchange, or None if the endpoint uses OpenAI's format and needs no translation.

        `call_id` is the request id.
        """


class NativeEndpoint:
    """Base class of endpoints in OpenAI's format. Replies pass unchanged, and deployments serve the same path."""

    def translator(self, call_id: str) -> None:
        return None
