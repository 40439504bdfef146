"""The head of a model that scores: a linear layer on the hidden state of one token, in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.layers.loader import LayerLoader
from backend.model_files.quantized_tensor import StoredTensor, dequantized
from backend.models.config import ModelConfig


class ScoreHead:
    """Computes the logits of a classification model's labels, or a score that is made of tokens' logits.

    The second is a row of the output head, or the difference of two rows. So a score costs one row instead of all rows
    of the vocabulary. vLLM does the same.
    """

    def __init__(self, config: ModelConfig, loader: LayerLoader, embedding: StoredTensor) -> None:
        """`embedding` has the embeddings of tokens, which can also be the output head. Raises `WeightsError`."""
        assert config.classifier is not None
        checkpoint, token_ids = loader.checkpoint, list(config.classifier.token_ids)
        self._bias: Tensor | None = None
        if not token_ids:
            shape = config.classifier.num_labels, config.hidden_size
            self._weight = checkpoint.take("score.weight", *shape, dtype=torch.float32)
            if "score.bias" in checkpoint:
                self._bias = checkpoint.take("score.bias", shape[0], dtype=torch.float32)
            return
        if not config.tie_word_embeddings:
            embedding = checkpoint.take_packed("lm_head.weight", config.vocab_size, config.hidden_size)
        rows = torch.cat([dequantized(embedding[i : i + 1]) for i in token_ids]).float() * config.logits_scale
        self._weight = rows if len(token_ids) == 1 else rows[:1] - rows[1:]

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden_size] -> [N, num_labels] float32."""
        return F.linear(hidden.float(), self._weight, self._bias)
