"""Model architectures Gemma 2 and Gemma 3."""

from __future__ import annotations

from backend.models.config import ModelConfig
from backend.models.decoder import Decoder
from backend.models.layers import SandwichNormLayer


class Gemma2ForCausalLM(Decoder):
    """Gemma 2: norms before and after each sublayer, and embeddings scaled by sqrt(hidden_size).

    Checkpoints store norm weights as the difference from one. Soft caps, windows and the attention scale come from
    config.json.
    """

    layer_kind = SandwichNormLayer
    norm_offset = 1.0

    @staticmethod
    def embedding_scale(config: ModelConfig) -> float:
        return float(config.hidden_size**0.5)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 3: Gemma 2 with a norm of each query and key head."""

    qk_norm = "head"
