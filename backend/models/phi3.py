"""Model architecture Phi 3."""

from __future__ import annotations

from backend.models.decoder import Decoder


class Phi3ForCausalLM(Decoder):
    """Phi 3: Llama with fused query, key and value projections and fused gate and up projections."""

    packed_qkv = "qkv_proj"
    mlp_names = ("gate_up_proj", "down_proj")
