"""Qwen 3, dense and as a mixture of experts."""

from __future__ import annotations

from backend.models.decoder import Decoder


class Qwen3ForCausalLM(Decoder):
    """Llama with norms of query and key heads."""

    qk_norm = "head"
