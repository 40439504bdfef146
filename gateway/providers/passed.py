"""Requests that a provider passes on as they came, except for the model's name: head, body, response and failures."""

from __future__ import annotations

import httpx2
import msgspec

from gateway.core.passed_requests import PassedRequest
from gateway.providers.base import Fault, ProviderFailure, UpstreamResponse
from gateway.providers.redaction import Redactor
from gateway.providers.transport import HTTPResponse

MAX_ANSWER_BYTES = 64 * 1024 * 1024  # an answer is held until it is complete
UNSUPPORTED_STATUS = 501
_LACKING_STATUSES = frozenset({404, 405, 501})  # with which servers say that they do not have a path
_ABSENT_STATUS = 404


def form_body(form: tuple[bytes, bytes], model: str) -> bytes:
    """Return a form with the deployment's model name."""
    return form[0] + model.encode() + form[1]


def upstream_path(base_path: bytes, passed: PassedRequest) -> bytes:
    """Return the path at the server. Paths outside /v1 are below the server's root, as for vLLM."""
    root = base_path.removesuffix(b"/v1")
    if root == base_path and passed.path.startswith("/v1/"):  # a base URL such as https://host/openai
        return base_path + passed.path.removeprefix("/v1").encode()
    return root + passed.path.encode()


class PassedResponse(UpstreamResponse):
    """A response of any media type. Its complete body is one chunk."""

    def __init__(self, response: HTTPResponse) -> None:
        self._response = response
        self._is_read = False
        self.content_type = response.header(b"content-type").decode("latin-1") or "application/octet-stream"

    async def __anext__(self) -> bytes:
        if self._is_read:
            raise StopAsyncIteration
        self._is_read = True
        try:
            body = await self._response.read_body(MAX_ANSWER_BYTES + 1)
        except httpx2.TransportError as error:
            raise ProviderFailure(Fault.CUT, str(error)) from error
        if len(body) > MAX_ANSWER_BYTES:
            raise ProviderFailure(Fault.MALFORMED, f"the response is longer than {MAX_ANSWER_BYTES} bytes")
        return body

    async def aclose(self) -> None:
        await self._response.aclose()


def lacking_path(failure: ProviderFailure, passed: PassedRequest, redactor: Redactor) -> ProviderFailure:
    """Return the failure, as `Fault.UNSUPPORTED` if the server does not have the path.

    The path is the client's choice, so its absence says nothing about the deployment's configuration.
    """
    about_path = failure.fault in (Fault.SETUP, Fault.UNSUPPORTED) or failure.status != _ABSENT_STATUS
    if failure.status not in _LACKING_STATUSES or not about_path:
        return failure
    message = f"the deployment does not serve {passed.path}"
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "unsupported_operation"}
    return ProviderFailure(
        Fault.UNSUPPORTED,
        message,
        status=UNSUPPORTED_STATUS,
        body=msgspec.json.encode({"error": error}),
        upstream_message=redactor.text(failure.upstream_message),
    )
