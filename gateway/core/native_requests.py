"""Requests in an API format that some deployments have themselves, and that pass to them as the client sent them."""

from __future__ import annotations

import msgspec

from gateway.core.errors import BadRequest

MESSAGES = "messages"  # Anthropic's Messages API
RESPONSES = "responses"  # OpenAI's Responses API
PASSED = "passed"  # events of any other endpoint, of which only the usage is read

# Request headers that pass to a deployment of the API, and that select versions and features of it.
PASSED_HEADERS: dict[str, tuple[str, ...]] = {
    MESSAGES: ("anthropic-version", "anthropic-beta"),
    RESPONSES: ("openai-beta",),
}
OUTPUT_LIMITS = {MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}  # the field that bounds the output
MAX_HEADER_BYTES = 4096  # of a passed header; a longer one is not passed


class NativeRequest(msgspec.Struct, frozen=True):
    """A request as the client sent it, for deployments that have its API.

    `fields` are its top-level values, each with the client's bytes. `refusal` says why the request cannot be translated
    to a chat for other deployments. None: it can be.
    """

    api: str
    fields: dict[str, msgspec.Raw]
    refusal: BadRequest | None = None
    headers: tuple[tuple[str, str], ...] = ()
    path: str = ""  # of the deployment's endpoint, if it is not the API's name

    def with_headers(self, given: dict[bytes, bytes]) -> NativeRequest:
        """Return the request with those of the client's headers that pass to the deployment."""
        headers = tuple(
            (name, value.decode("latin-1"))
            for name in PASSED_HEADERS[self.api]
            if (value := given.get(name.encode())) is not None and len(value) <= MAX_HEADER_BYTES
        )
        return msgspec.structs.replace(self, headers=headers) if headers else self

    def with_output_limit(self, tokens: int) -> NativeRequest:
        """Return the request with a bound on its output, unless it is for an endpoint that takes none."""
        if self.path:
            return self
        limited = {**self.fields, OUTPUT_LIMITS[self.api]: msgspec.Raw(b"%d" % tokens)}
        return msgspec.structs.replace(self, fields=limited)
