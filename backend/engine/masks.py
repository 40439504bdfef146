"""Which tokens may come next in the rows that follow a grammar, found out while the model computes.

A thread of its own asks the walks (`Grammar`, request.py) of a step, one after the other. Those of llguidance let go of
the GIL, and a forward pass mostly takes longer, so that the answers are there when the logits are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.engine.request import Grammar, Request


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The G rows of a batch that follow a grammar, and the tokens that may come next in each."""

    rows: Tensor  # [G] int64
    bitmask: Tensor  # [G, ceil(vocab_size / 32)] int32: token i is bit i % 32 of word i // 32
    errors: dict[int, str]  # by row: grammars that cannot go on


class MaskFiller:
    """For the sequences of one engine."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._num_words = -(-vocab_size // 32)
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def start(self, requests: Sequence[Request]) -> Future[AllowedTokens] | None:
        """For one row per request; None if none of them follows a grammar. The requests must not change meanwhile."""
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
