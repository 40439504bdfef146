"""Grammar masks of a step: which tokens may come next in each constrained row.

The grammars (`Grammar`, constraint.py) compute their masks while the model runs. A mask that is not ready when the
logits are is late: the step samples no token for its request, and no further step includes the request until the mask
is ready. So a slow grammar delays its own request only. Everyone waits for masks for at most a share of a step's time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.engine.request import Request

WAIT_SHARE = 0.5  # how long a step waits for masks, as a share of the duration of the previous step
MIN_WAIT_SECONDS = 0.0005


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The G rows of a batch that follow a grammar, and the tokens that may come next in each."""

    rows: Tensor  # [G] int64
    bitmask: Tensor  # [G, ceil(vocab_size / 32)] int32: token i is bit i % 32 of word i // 32
    errors: dict[int, str]  # by row: grammars that cannot continue
    late: frozenset[int] = frozenset()  # rows whose mask is not ready; their bitmask allows every token


class MaskCollector:
    """Collects the masks of one engine's steps. Not thread-safe."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.num_words = -(-vocab_size // 32)  # of a mask
        self._device = device
        self._step_seconds = 0.0  # duration of the previous step
        self._began = 0.0

    def begin_step(self) -> None:
        """Marks the beginning of a step. Its end is the next call of `end_step`."""
        self._began = time.perf_counter()

    def end_step(self) -> None:
        self._step_seconds = time.perf_counter() - self._began

    def collect(self, requests: Sequence[Request]) -> AllowedTokens | None:
        """The masks of one row per request. None if no request follows a grammar."""
        rows = [row for row, request in enumerate(requests) if request.grammar]
        if not rows:
            return None
        bitmask = torch.zeros((len(rows), self.num_words), dtype=torch.int32)
        errors, late = self.fill([requests[row] for row in rows], bitmask)
        return AllowedTokens(
            torch.tensor(rows, device=self._device),
            bitmask.to(self._device),
            {rows[index]: error for index, error in errors.items()},
            frozenset(rows[index] for index in late),
        )

    def fill(self, requests: Sequence[Request], bitmask: Tensor) -> tuple[dict[int, str], frozenset[int]]:
        """Writes the masks of G requests with grammars. Returns errors and late masks by number of the request.

        bitmask: at least [G, num_words] int32, on the host, as in `AllowedTokens`.
        """
        deadline = time.perf_counter() + max(MIN_WAIT_SECONDS, WAIT_SHARE * self._step_seconds)
        errors, late = {}, set()
        for index, request in enumerate(requests):
            assert request.grammar
            words = bitmask[index]
            if not request.grammar.is_ready(max(0.0, deadline - time.perf_counter())):
                late.add(index)
                words.fill_(-1)
            elif error := request.grammar.fill_mask(words.data_ptr(), words.nbytes):
                errors[index] = error
        return errors, frozenset(late)
