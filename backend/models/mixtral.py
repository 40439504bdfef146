"""Mixtral."""

from __future__ import annotations

from backend.models.decoder import Decoder


class MixtralForCausalLM(Decoder):
    """Llama with experts, under the names of Mistral's own checkpoints."""

    sparse_name = "block_sparse_moe"
    expert_names = ("w1", "w3", "w2")
