"""How the hidden states of a prompt become one vector. No tensors."""

from __future__ import annotations

import enum


class Pooling(enum.Enum):
    """Which final hidden states make the vector. The values are those of sentence-transformers and vLLM.

    The vector is an embedding. If the model has a classification head, it is the head's logits for that vector.
    """

    MEAN = "mean"  # the mean over all tokens
    LAST = "last"  # of the last token, which has attended to all others; earlier tokens may come from the prefix cache
    CLS = "cls"  # of the first token
