"""Grammar masks of a step: which tokens may come next in each constrained row, computed while the model runs.

A separate thread asks the step's grammars (`Grammar`, constraint.py) one after the other. Those of llguidance release
the GIL, and a forward pass usually takes longer, so the masks are ready when the logits are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.engine.constraint import Grammar
from backend.engine.request import Request


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The G rows of a batch that follow a grammar, and the tokens that may come next in each."""

    rows: Tensor  # [G] int64
    bitmask: Tensor  # [G, ceil(vocab_size / 32)] int32: token i is bit i % 32 of word i // 32
    errors: dict[int, str]  # by row: grammars that cannot continue


class MaskFiller:
    """Computes the masks of one engine's steps on its own thread."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._num_words = -(-vocab_size // 32)
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def start(self, requests: Sequence[Request]) -> Future[AllowedTokens] | None:
        """Starts on the masks of one row per request. None if no request follows a grammar.

        The requests must not change before the future is done.
        """
        grammars = {row: request.grammar for row, request in enumerate(requests) if request.grammar}
        return self._thread.submit(self._fill, grammars) if grammars else None

    def _fill(self, grammars: Mapping[int, Grammar]) -> AllowedTokens:
        bitmask = torch.zeros((len(grammars), self._num_words), dtype=torch.int32)
        errors = {}
        for index, (row, grammar) in enumerate(grammars.items()):
            words = bitmask[index]
            if error := grammar.fill_mask(words.data_ptr(), words.nbytes):
                errors[row] = error
        return AllowedTokens(torch.tensor([*grammars], device=self._device), bitmask.to(self._device), errors)
