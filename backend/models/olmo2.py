"""OLMo 2."""

from __future__ import annotations

from backend.models.decoder import Decoder
from backend.models.layers import PostNormLayer


class Olmo2ForCausalLM(Decoder):
    """Norms after each sublayer, and over all query and key heads as one vector."""

    layer_kind = PostNormLayer
    qk_norm = "all"
