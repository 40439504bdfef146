"""Model architecture Mixtral."""

from __future__ import annotations

from backend.models.decoder import Decoder


class MixtralForCausalLM(Decoder):
    """Mixtral: Llama with a mixture of experts, whose tensors are named as in Mistral's own checkpoints."""

    sparse_name = "block_sparse_moe"
    expert_names = ("w1", "w3", "w2")
