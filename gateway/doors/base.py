"""The port of the doors: one wire in, each. A door reads its body into what the phases act on, and nothing more.

What a door does not name is passed on untouched: unknown parameters are the server's to judge. What it names is
checked here, and a wrong type is refused with the name of the field.

Inside, everything speaks OpenAI's chat, completions and embeddings: a `Call`'s fields, the chunks of an answer, errors.
The door of another wire gives each exchange a `Translator`, which reads a body into those fields and words in its own
way what leaves. Nothing between the two borders knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

import msgspec

from gateway.errors import BadRequest, GatewayError
from gateway.types import Operation, Said

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


class Common(msgspec.Struct):
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


class Asked(msgspec.Struct, frozen=True):
    """A body, read. `pieces` is the prompt's text in the order in which the server will lay it out."""

    common: Common
    fields: Fields
    pieces: tuple[bytes, ...]
    max_output_tokens: int | None
    choices: int = 1
    deterministic: bool = False
    prompt_tokens: int | None = None  # known only where the prompt came as token ids
    messages: Sequence[Said] = ()  # of a chat
    piece_of: Callable[[bytes], bytes] = bytes  # a message's JSON as its piece
    reread: Callable[[Fields, bytes], Asked] | None = None  # of messages: for fields in another form than these
    hints: frozenset[str] = frozenset()  # fields of which a server that can not heed them is to hear nothing
    with_breakpoints: Callable[[], Asked] | None = None  # where the client has set some, for servers that heed them
    plain: bool = True  # every message is text, so that none of its pieces is JSON as the client wrote it
    tools: int = 0  # so many of the pieces, the first ones, are tools; then there is one for each message


class Reader(Protocol):
    @property
    def operation(self) -> Operation:
        """What servers are asked for."""

    def read(self, fields: Fields, body: bytes) -> Asked:
        """Check and read a body whose top-level `fields` are given. Raises `BadRequest`.

        What it gives is in the words of `operation`, whatever the wire is. It may be called again for the same body.
        """


class Translator(Reader, Protocol):
    """One exchange on another wire than the house's: what comes is read into the house's words, and what leaves is
    put into the wire's. Each of a reply's parts comes here once, in order, right before it is sent.

    What can not be put into the wire's words is an `UpstreamCut`: it is then told as any other failure.
    """

    def headers(self, named: Mapping[str, str]) -> Mapping[str, str]:
        """Further headers of the reply, which has those that are `named`."""

    def answer(self, body: bytes) -> bytes:
        """A whole answer."""

    def frames(self, chunk: bytes, *, last: bool) -> bytes:
        """What the client gets of whole event frames; empty where that is nothing. Only with the `last` ones, of which
        `[DONE]` is one, has the answer come to its end, and only then may it look so.
        """

    def refusal(self, error: GatewayError) -> tuple[int, bytes] | None:
        """The status and body that tell of an error before anything was sent; None where the house's are good."""

    def failure(self, error: GatewayError) -> bytes:
        """The frames that tell of an error behind others. No client may take them for an end of the answer."""


class Door(Reader, Protocol):
    path: ClassVar[str]  # behind /v1/
    operation: ClassVar[Operation]

    def translator(self, call_id: str) -> Translator | None:
        """Of one exchange, and `call_id` is its request id; None where the wire is the house's own."""


class HouseDoor:
    """What the doors share whose wire is the house's own: bytes leave as they come, and the path is the servers'."""

    def translator(self, call_id: str) -> None:
        return None


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
