"""Model architecture Llama, and architectures with the same computation."""

from __future__ import annotations

from backend.models.decoder import Decoder


class LlamaForCausalLM(Decoder):
    """Llama 2 and 3, Mistral, and SmolLM3.

    Mistral's sliding window and SmolLM3's layers without rotary embedding come from config.json.
    """
