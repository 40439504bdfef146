from __future__ import annotations

from backend.models.decoder import Decoder


class Phi3ForCausalLM(Decoder):
    """Projections that share an input are one tensor already."""

    packed_qkv = "qkv_proj"
    mlp_names = ("gate_up_proj", "down_proj")
