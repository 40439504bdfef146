"""The port of the transforms, which make equal prompts equal bytes. Each one has a safety class: the promise it keeps.

* P0  provably the same prompt: the chat template renders both forms to the same tokens
* P1  equal by the JSON and JSON Schema standards, but other bytes
* P2  known noise is removed
* P3  changes what the model reads: only if the policy names the transform

No transform, of whatever class, changes what assistants said, tool results, signed reasoning, or anything that carries
a vendor's cache breakpoint. P0 may write their JSON differently, but their values stay.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

import msgspec

from gateway.prompts.transforms.shared_decisions import SharedDecisions
from gateway.types import PromptMessage

Fields = dict[str, msgspec.Raw]
Message = dict[str, msgspec.Raw]  # its top-level values

SYSTEM_ROLES = frozenset({"system", "developer"})
LONG_BYTES = 128 * 1024  # some 32k tokens


_string = msgspec.json.Decoder(str)


class Safety(enum.IntEnum):
    """The safety class of a transform; a higher one changes more."""

    P0 = 0
    P1 = 1
    P2 = 2
    P3 = 3


class TransformPlan(msgspec.Struct, frozen=True):
    """Which transforms a conversation gets, from its first request to its last."""

    version: int
    level: str
    opt_in: tuple[str, ...] = ()  # names of P3 transforms
    template_date: str | None = None


class TransformContext(msgspec.Struct, frozen=True):
    """What a transform may use besides the body.

    `scope` is the salt: different cache groups share no decisions.
    """

    plan: TransformPlan
    scope: str
    decisions: SharedDecisions
    message_bytes: Sequence[ValueTransform] = ()  # the plan's transforms of the messages' bytes, in order
    messages: Sequence[MessagesTransform] = ()  # those of parsed messages, which come after them


class MessagesView(msgspec.Struct, frozen=True):
    """A chat's messages as the endpoint parsed them, for a check before their JSON is decoded."""

    messages: Sequence[PromptMessage]
    plain: bool  # all are text, or parts of text and media; no other parts, no tool calls
    head: bytes  # the beginning of their JSON
    size_bytes: int  # of their JSON

    @property
    def is_long(self) -> bool:
        """Whether rewriting the JSON costs as much as parsing it.

        Then it is not rewritten if that changed only its bytes, and neither the deployment's tokens nor the
        fingerprint.
        """
        return self.size_bytes > LONG_BYTES


class Transform(ABC):
    """One way to make a body more canonical. It changes one top-level value of the body at a time.

    It gets the value as bytes (`ValueTransform`) or as messages (`MessagesTransform`). Applied to its own result, it
    changes nothing. A value of an unexpected shape stays as it is, for the deployment to judge: `msgspec` errors may be
    raised.
    """

    name: ClassVar[str]
    safety: ClassVar[Safety]
    fields: ClassVar[tuple[str, ...]]  # the top-level values that it may change

    def may_apply(self, view: MessagesView) -> bool:
        """Whether `messages` may contain something that this transform changes.

        Must be nearly free: called for every request.
        """
        return False


class ValueTransform(Transform):
    """A transform of a value's bytes."""

    @abstractmethod
    def apply(self, raw: bytes, context: TransformContext) -> bytes | None:
        """The changed value; None if the transform changes nothing.

        Raises `DecisionNotLoaded` if the storage has to be read first.
        """


class MessagesTransform(Transform):
    """A transform of the messages."""

    fields: ClassVar[tuple[str, ...]] = ("messages",)
    first_only: ClassVar[bool] = False  # it changes the first message only, and reads no other one

    @abstractmethod
    def change(self, messages: list[Message], context: TransformContext) -> Iterable[int]:
        """Change messages in place. Returns the indices of the changed ones.

        Raises `DecisionNotLoaded` if the storage has to be read first.
        """


def role_of(message: Message) -> str:
    """The role of a message, however its JSON writes it: `"r\\u006fle": "syst\\u0065m"` is a system message, too."""
    return _string.decode(message.get("role", b'""'))
