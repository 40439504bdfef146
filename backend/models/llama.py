from __future__ import annotations

from backend.models.decoder import Decoder


class LlamaForCausalLM(Decoder):
    """Llama, and Mistral within its attention window: the shared decoder as it stands."""
