"""Model architecture OLMo 2."""

from __future__ import annotations

from backend.models.decoder import Decoder
from backend.models.layers import PostNormLayer


class Olmo2ForCausalLM(Decoder):
    """OLMo 2: a norm after each sublayer, one over all query heads and one over all key heads."""

    layer_kind = PostNormLayer
    qk_norm = "all"
