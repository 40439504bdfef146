from __future__ import annotations

from backend.models.decoder import Decoder


class Qwen3ForCausalLM(Decoder):
    has_qk_norm = True
