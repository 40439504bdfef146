"""Model architecture Qwen 3, dense and with a mixture of experts."""

from __future__ import annotations

from backend.models.decoder import Decoder


class Qwen3ForCausalLM(Decoder):
    """Qwen 3: Llama with a norm of each query and key head."""

    qk_norm = "head"
