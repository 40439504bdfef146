from __future__ import annotations

from backend.models.decoder import Decoder


class Qwen3ForCausalLM(Decoder):
    """Dense, and as a mixture of experts."""

    qk_norm = "head"
