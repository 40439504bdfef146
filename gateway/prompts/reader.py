"""The body reader port: how an endpoint parses a request body into what the phases act on.

A reader passes on fields that it does not name untouched, because the deployment judges unknown parameters. It checks
the fields that it names, and refuses a wrong type with the field's name. Endpoints implement the port.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Protocol, TypeVar, runtime_checkable

import msgspec

from gateway.core.errors import BadRequest
from gateway.core.native_requests import NativeRequest
from gateway.core.passed_requests import PassedRequest
from gateway.prompts.media.counting import Piece
from gateway.types import Operation, PromptMessage

NAME_CHARS_MAX = 512  # of client-given names that the ledger stores; bounds the size of a row
UTF8_BYTES = 1024 * 1024  # that are decoded at once
MAX_FIELDS = 1000  # of a body, at its top level: far above the parameters of any engine
MAX_TOKENS = 2**31 - 1  # of an answer: far above any model's limit, and small enough for any store's counters

# Clients of the other vendors' wires send a reasoning effort, and Codex a verbosity, to every model that they take for
# one of the vendor's. A deployment that does not support these fields gets the request without them.
ADVISORY_FIELDS = frozenset({"reasoning_effort", "verbosity"})

Fields = dict[str, msgspec.Raw]
Body = TypeVar("Body")
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
Metadata = Annotated[  # OpenAI's bounds of an object's metadata
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
    msgspec.Meta(max_length=16),
]
Choices = Annotated[int, msgspec.Meta(ge=1, le=128)]


class StreamOptions(msgspec.Struct):
    """OpenAI's `stream_options`, with vLLM's `continuous_usage_stats`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonFields(msgspec.Struct):
    """The fields that the phases act on, common to the bodies of all endpoints."""

    model: str
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: str | None = None
    service_tier: Name | None = None
    metadata: dict[str, Any] | None = None
    temperature: float | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ParsedBody(msgspec.Struct, frozen=True):
    """A parsed body. `pieces` is the prompt's text and media in the order in which the deployment will lay them out."""

    common: CommonFields
    fields: Fields
    pieces: tuple[Piece, ...]
    max_output_tokens: int | None
    choices: int = 1
    deterministic: bool = False
    prompt_tokens: int | None = None  # known only if the prompt came as token ids
    messages: Sequence[PromptMessage] = ()  # of a chat; empty for other operations
    piece_of: Callable[[bytes], Piece] = bytes  # maps a message's JSON to its piece
    reread: Callable[[Fields, bytes], ParsedBody] | None = None  # parses changed fields; set if there are messages
    hints: frozenset[str] = frozenset()  # fields that are dropped for deployments that do not support them
    # Parses the body with its cache breakpoints, for deployments that support them; None if the client set none.
    with_breakpoints: Callable[[], ParsedBody] | None = None
    plain: bool = True  # every message is text or text and media, so no piece contains JSON as the client wrote it
    passed: PassedRequest | None = None  # set if the body passes to the deployment as it came
    native: NativeRequest | None = None  # set if the client's API is one that deployments may have themselves
    tools: int = 0  # how many of the pieces, the first ones, are tools; the others are one for each message


class BodyReader(Protocol):
    """Parses the request bodies of one endpoint."""

    @property
    def operation(self) -> Operation:
        """The operation to request from the deployment."""

    def read(self, fields: Fields, body: bytes) -> ParsedBody:
        """Check and parse a body whose top-level `fields` are given. Raises `BadRequest`.

        The result has the fields of `operation`'s API, also if the client uses another one. May be called again for the
        same body.
        """


@runtime_checkable
class NativeReader(Protocol):
    """A body reader of an API that deployments may have themselves (`gateway.core.native_requests`)."""

    @property
    def api(self) -> str:
        """The name of the API."""

    def read_native(self, fields: Fields, body: bytes, refusal: BadRequest) -> ParsedBody:
        """Parse a body that `read` refuses, as far as the phases need, for a deployment that has the API itself.

        Raises `refusal` if no deployment may get the body.
        """


_fields = msgspec.json.Decoder(Fields)


def read_fields(body: bytes) -> Fields:
    """The top-level values of a JSON object, as the bytes that the client sent. Raises `BadRequest`.

    Checks that all of them are valid UTF-8, even those that nothing here parses, so that no later reader fails on them.
    """
    try:
        if not body.isascii():
            _check_utf8(body)
        fields = _fields.decode(body)
    except msgspec.ValidationError:
        raise BadRequest("the body must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise _not_json(problem) from None
    if len(fields) > MAX_FIELDS:
        raise BadRequest(f"the body has more than {MAX_FIELDS} fields")
    return fields


def check_utf8(body: bytes) -> None:
    """Raise `BadRequest` if a body is not UTF-8. Values that pass as they came are otherwise not checked."""
    try:
        _check_utf8(body)
    except UnicodeDecodeError as problem:
        raise _not_json(problem) from None


def _check_utf8(body: bytes) -> None:
    """Raise `UnicodeDecodeError`. Decodes long bodies in parts, so that other threads run between them."""
    if len(body) <= UTF8_BYTES:
        body.decode()
        return
    at, view = 0, memoryview(body)
    while at < len(body):
        try:
            at += utf_8_decode(view[at : at + UTF8_BYTES], "strict", at + UTF8_BYTES >= len(body))[1]
        except UnicodeDecodeError as problem:
            where = at + problem.start, at + problem.end
            raise UnicodeDecodeError(problem.encoding, body, *where, problem.reason) from None


def decode(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """Parse a body by its type. Raises `BadRequest` that names the field, as in `messages[0].role`."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as problem:
        message, _, path = str(problem).partition(" - at `$")
        param = ".".join(filter(None, (path.rstrip("`").lstrip("."), _field_in(message)))) or None
        raise BadRequest(message if not param else f"{param}: {message}", param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise _not_json(problem) from None


def _not_json(problem: Exception) -> BadRequest:
    return BadRequest(f"the body is not valid JSON: {problem}")


def _field_in(message: str) -> str | None:
    """The field that msgspec's message names: `Object missing required field `model`` -> `model`."""
    _, named, field = message.partition(" field `")
    return field.rstrip("`") if named else None
