"""Structured output as the engine sees it: which tokens may come next. `grammar.py` has the implementations."""

from __future__ import annotations

from typing import Protocol


class Grammar(Protocol):
    """The grammar of one sequence's output, and how far the output has got. Owned by the engine once submitted.

    When the output is complete, only a token that ends the sequence is allowed.
    """

    def fill_mask(self, address: int, num_bytes: int) -> str:
        """Writes the tokens that may come next to memory: token i is bit `i % 32` of int32 number `i // 32`.

        Returns an error message, or "" on success.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Advances past a token that the mask allowed."""
        ...


class Constraint(Protocol):
    """A compiled grammar. Every sequence that must follow it gets its own `Grammar`."""

    def start(self) -> Grammar:
        """A `Grammar` at its beginning, for one sequence."""
        ...
