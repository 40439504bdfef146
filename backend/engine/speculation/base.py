"""The interface of the drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from backend.engine.request import Request


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Asks for up to `num_tokens` drafts after a running request's last token. The request has blocks for them."""

    request: Request
    num_tokens: int  # at least 1


class Drafter(ABC):
    """Predicts the next tokens of requests. Made from a `ResolvedConfig`.

    It is not notified when a request ends, so it must keep its state about requests by weak reference.
    """

    @abstractmethod
    def draft(self, wanted: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        """For each entry at most `num_tokens` tokens. Returning none is always safe; wrong ones only cost time."""

    def set_num_threads(self, num_threads: int) -> None:  # noqa: B027 - most drafters compute in one thread
        """Sets how many threads the drafter uses. Only between two steps."""
