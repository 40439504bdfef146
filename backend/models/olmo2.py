from __future__ import annotations

from backend.models.decoder import Decoder
from backend.models.layers import PostNormLayer


class Olmo2ForCausalLM(Decoder):
    layer_kind = PostNormLayer
    qk_norm = "all"
