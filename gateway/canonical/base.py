"""Transforms that make equal prompts equal bytes, each with the promise that it keeps.

* P0  provably the same prompt: the chat template renders both forms to the same tokens
* P1  equal by the JSON standard, other bytes
* P2  known noise removed
* P3  changes what the model reads: never without being asked for

Never touched, whatever the level: assistant history, tool results, signed reasoning, and anything that carries a
vendor's cache breakpoint.
"""

from __future__ import annotations

import enum
from typing import ClassVar, Protocol

import msgspec

Fields = dict[str, msgspec.Raw]


class Safety(enum.IntEnum):
    P0 = 0
    P1 = 1
    P2 = 2
    P3 = 3


class Transform(Protocol):
    """One way to make a body more canonical."""

    name: ClassVar[str]
    safety: ClassVar[Safety]

    def apply(self, fields: Fields) -> Fields | None:
        """The body's top-level fields with the transform applied; None where it would change nothing.

        What is given is not changed. Applying it to its own result gives None.
        """
