from __future__ import annotations

from backend.models.config import ModelConfig
from backend.models.decoder import Decoder
from backend.models.layers import SandwichNormLayer


class Gemma2ForCausalLM(Decoder):
    """Norms whose weights are kept as their difference from one, on both sides of each sublayer; embeddings as long as
    their width asks for. Soft caps, windows and the scale of attention stand in config.json."""

    layer_kind = SandwichNormLayer
    norm_offset = 1.0

    @staticmethod
    def embedding_scale(config: ModelConfig) -> float:
        return float(config.hidden_size**0.5)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    qk_norm = "head"
