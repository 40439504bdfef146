"""The port between the wire and `Call`: a body reader parses a request body into what the phases act on.

Fields that the reader does not name are passed on untouched: unknown parameters are the deployment's to judge. Fields
that it names are checked here, and a wrong type is refused with the name of the field. Endpoints implement the port.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from gateway.core.errors import BadRequest
from gateway.types import Operation, PromptMessage

NAME_CHARS_MAX = 512  # of what a client names and the ledger keeps: one row of megabytes would be everybody's trouble
MAX_TOKENS = 2**31 - 1  # of an answer: far above any model, and small enough to be counted in any store

# Clients of the other vendors' wires send an effort to every model that they believe to reason, without being told to.
ADVICE = frozenset({"reasoning_effort"})

Fields = dict[str, msgspec.Raw]
Body = TypeVar("Body")
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=128)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonFields(msgspec.Struct):
    """What every door's body has and the phases act on."""

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
    """A body, read. `pieces` is the prompt's text in the order in which the server will lay it out."""

    common: CommonFields
    fields: Fields
    pieces: tuple[bytes, ...]
    max_output_tokens: int | None
    choices: int = 1
    deterministic: bool = False
    prompt_tokens: int | None = None  # known only where the prompt came as token ids
    messages: Sequence[PromptMessage] = ()  # of a chat
    piece_of: Callable[[bytes], bytes] = bytes  # a message's JSON as its piece
    reread: Callable[[Fields, bytes], ParsedBody] | None = None  # of messages: for fields in another form than these
    hints: frozenset[str] = frozenset()  # fields of which a server that can not heed them is to hear nothing
    with_breakpoints: Callable[[], ParsedBody] | None = (
        None  # where the client has set some, for servers that heed them
    )
    plain: bool = True  # every message is text, so that none of its pieces is JSON as the client wrote it
    tools: int = 0  # so many of the pieces, the first ones, are tools; then there is one for each message


class BodyReader(Protocol):
    @property
    def operation(self) -> Operation:
        """What servers are asked for."""

    def read(self, fields: Fields, body: bytes) -> ParsedBody:
        """Check and read a body whose top-level `fields` are given. Raises `BadRequest`.

        What it gives is in the words of `operation`, whatever the wire is. It may be called again for the same body.
        """


_fields = msgspec.json.Decoder(Fields)


def read_fields(body: bytes) -> Fields:
    """The top-level values of a JSON object, as the bytes that the client sent.

    All of them are UTF-8 then, also what nobody here reads, so that no later reader stumbles over it.
    """
    try:
        body.decode()
        return _fields.decode(body)
    except msgspec.ValidationError:
        raise BadRequest("the body must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise _not_json(problem) from None


def decode(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """Read a body by its type; what does not fit is refused by name, as in `messages[0].role`."""
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
    """`Object missing required field `model` -> model; likewise of an unknown one."""
    _, named, field = message.partition(" field `")
    return field.rstrip("`") if named else None
