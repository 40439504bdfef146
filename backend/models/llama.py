from __future__ import annotations

from backend.models.decoder import Decoder


class LlamaForCausalLM(Decoder):
    """Llama 2 and 3, Mistral with its sliding window, and SmolLM3, some of whose layers have no positions: what they
    have of their own stands in config.json."""
