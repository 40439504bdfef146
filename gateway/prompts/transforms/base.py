"""Transforms that make equal prompts equal bytes, each with the promise that it keeps.

* P0  provably the same prompt: the chat template renders both forms to the same tokens
* P1  equal by the JSON and JSON Schema standards, other bytes
* P2  known noise removed
* P3  changes what the model reads: never without being asked for by name

Never touched, whatever the level: what assistants have said, tool results, signed reasoning, and anything that
carries a vendor's cache breakpoint. P0 may write their JSON in another way; their values stay what they are.
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

SYSTEM_ROLES = frozenset({b'"system"', b'"developer"'})
LONG_BYTES = 128 * 1024  # some 32k tokens


class Safety(enum.IntEnum):
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
    """What a transform may know besides the body. `scope` is the salt: no two cache groups share a memory."""

    plan: TransformPlan
    scope: str
    memory: SharedDecisions
    for_messages: Sequence[Transform] = ()  # those of the plan that may change messages, in order


class MessagesView(msgspec.Struct, frozen=True):
    """A chat's messages as their door has read them, for a look before they are taken apart."""

    messages: Sequence[PromptMessage]
    plain: bool  # all of them are text: no parts, and no tool calls
    head: bytes  # the first bytes of their JSON
    size_bytes: int  # of their JSON

    @property
    def long(self) -> bool:
        """To write them down anew costs as much as to read them. Not worth it where neither the server's prompt nor our
        fingerprint is another one by it, but only the bytes between."""
        return self.size_bytes > LONG_BYTES


class Transform(ABC):
    """One way to make a body more canonical. It sees one top-level value of the body at a time, as bytes
    (`ValueTransform`) or as messages (`MessagesTransform`).

    Applied to its own result, it changes nothing. What is not of the shape that a field has is left as it is, for the
    server to judge: msgspec's errors may be raised.
    """

    name: ClassVar[str]
    safety: ClassVar[Safety]
    fields: ClassVar[tuple[str, ...]]  # the top-level values that it may change

    def sees(self, view: MessagesView) -> bool:
        """Whether `messages` may hold something for it. Near free: asked of every request whose messages it may
        change.
        """
        return False


class ValueTransform(Transform):
    @abstractmethod
    def apply(self, raw: bytes, context: TransformContext) -> bytes | None:
        """The value with the transform applied; None where it would change nothing.

        Raises `NotInMemory` where the storage has to be asked first.
        """


class MessagesTransform(Transform):
    fields: ClassVar[tuple[str, ...]] = ("messages",)
    same_words: ClassVar[bool] = False  # what it changes says the same to a door: no piece of the prompt's text differs

    @abstractmethod
    def change(self, messages: list[Message]) -> Iterable[int]:
        """Change messages in place; the numbers of those that are now others."""
