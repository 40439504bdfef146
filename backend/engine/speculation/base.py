"""The port of the drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from backend.engine.request import Request


@dataclass(frozen=True, slots=True)
class Wanted:
    """Up to `num_tokens` guesses at what follows a running request's last token, for which it has blocks."""

    request: Request
    num_tokens: int  # at least 1


class Drafter(ABC):
    """Made from a `ResolvedConfig`. What it keeps about a request it refers to weakly: nobody says when that ends."""

    @abstractmethod
    def draft(self, wanted: Sequence[Wanted]) -> list[tuple[int, ...]]:
        """For each at most as many as are wanted. None at all is always safe, and wrong ones only cost time."""
