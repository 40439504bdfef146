"""The port of the doors: one wire in, each.

Inside, everything speaks OpenAI's chat, completions and embeddings: a `Call`'s fields, the chunks of an answer, errors.
The door of another wire gives each exchange a `Translator`, which reads a body into those fields and words in its own
way what leaves. Nothing between the two borders knows of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from gateway.core.errors import GatewayError
from gateway.prompts.reader import BodyReader
from gateway.types import Operation


class Translator(BodyReader, Protocol):
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


class Endpoint(BodyReader, Protocol):
    path: ClassVar[str]  # behind /v1/
    operation: ClassVar[Operation]

    def translator(self, call_id: str) -> Translator | None:
        """Of one exchange, and `call_id` is its request id; None where the wire is the house's own."""


class NativeEndpoint:
    """What the doors share whose wire is the house's own: bytes leave as they come, and the path is the servers'."""

    def translator(self, call_id: str) -> None:
        return None
