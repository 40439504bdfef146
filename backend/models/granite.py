"""Granite."""

from __future__ import annotations

from backend.models.decoder import Decoder
from backend.models.layers import ScaledLayer


class GraniteForCausalLM(Decoder):
    """Granite: Llama with four scaling factors, for embeddings, attention scores, sublayer outputs and logits."""

    layer_kind = ScaledLayer
