"""The logits that an engine computes, for tests that compare them with those of another implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from backend.engine.engine import Engine


def record_logits(engine: Engine) -> list[Tensor]:
    """Returns a list that gets the logits of each later step: [N, vocab_size]."""
    seen: list[Tensor] = []
    model: Any = engine.runner._model
    compute: Callable[[Tensor], Tensor] = model.logits
    scores: Callable[[Tensor], Tensor] = model.scores

    def recorded(hidden: Tensor) -> Tensor:
        seen.append(compute(hidden))
        return scores(hidden)

    model.scores = recorded
    return seen
