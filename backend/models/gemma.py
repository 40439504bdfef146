"""Gemma 2 and 3."""

from __future__ import annotations

from backend.models.config import ModelConfig
from backend.models.decoder import Decoder
from backend.models.layers import SandwichNormLayer


class Gemma2ForCausalLM(Decoder):
    """Norms on both sides of each sublayer, stored as the difference from one; embeddings scaled by sqrt(hidden_size).

    Soft caps, windows and the attention scale come from config.json.
    """

    layer_kind = SandwichNormLayer
    norm_offset = 1.0

    @staticmethod
    def embedding_scale(config: ModelConfig) -> float:
        return float(config.hidden_size**0.5)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 2 with norms of query and key heads."""

    qk_norm = "head"
