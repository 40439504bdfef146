"""Structured output as the engine sees it: which tokens may come next. `grammar.py` has the implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Grammar(Protocol):
    """The grammar of one sequence's output, and how far the output has got. Owned by the engine once submitted.

    When the output is complete, only a token that ends the sequence is allowed.
    """

    error: str  # why the output cannot continue, or ""
    forced: tuple[int, ...]  # the next tokens, as far as they are known and each is the only one allowed

    def is_ready(self, seconds: float = 0.0) -> bool:
        """Whether the next mask is known. Waits for it for at most `seconds`."""
        ...

    def fill_mask(self, address: int, num_bytes: int) -> str:
        """Writes the tokens that may come next to memory: token i is bit `i % 32` of int32 number `i // 32`.

        Returns an error message, or "" on success. Blocks if the mask is not ready.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Advances past a token that the mask allowed. Does not wait for the next mask."""
        ...


class Constraint(Protocol):
    """A compiled grammar. Every sequence that must follow it gets its own `Grammar`."""

    field: str  # the field of the request that requires it, for errors
    ignored: Sequence[str]  # what of the field cannot be enforced

    def start(self) -> Grammar:
        """A `Grammar` at its beginning, for one sequence."""
        ...
