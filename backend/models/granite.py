from __future__ import annotations

from backend.models.decoder import Decoder
from backend.models.layers import ScaledLayer


class GraniteForCausalLM(Decoder):
    """Llama with four factors: on embeddings, attention scores, what a sublayer adds, and logits."""

    layer_kind = ScaledLayer
