from __future__ import annotations

from backend.models.decoder import Decoder


class MixtralForCausalLM(Decoder):
    sparse_name = "block_sparse_moe"
    expert_names = ("w1", "w3", "w2")
