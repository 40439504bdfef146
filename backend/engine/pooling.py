"""How the hidden states of a prompt become one vector. No tensors."""

from __future__ import annotations

import enum
from collections.abc import Sequence


class Pooling(enum.Enum):
    """Which final hidden states make the vector. The values are those of sentence-transformers and vLLM.

    The vector is an embedding. If the model has a classification head, it is the head's logits for that vector.
    """

    MEAN = "mean"  # the mean over all tokens
    LAST = "last"  # of the last token, which has attended to all others; earlier tokens may come from the prefix cache
    CLS = "cls"  # of the first token


def add_pooled(so_far: list[float], vector: Sequence[float]) -> list[float]:
    """Adds what a step has computed of a vector, or nothing, to what earlier steps have."""
    if so_far and vector:
        return [a + b for a, b in zip(so_far, vector, strict=True)]
    return so_far or list(vector)


def finish_pooled(pooling: Pooling, pooled: Sequence[float], num_tokens: int) -> tuple[float, ...]:
    """The vector of a prompt of `num_tokens` whose last token has been computed."""
    return tuple(value / num_tokens for value in pooled) if pooling is Pooling.MEAN else tuple(pooled)
