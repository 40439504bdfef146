"""Model architectures GLM 4: the first one (`Glm`) and that of GLM-4-0414 and GLM-Z1 (`Glm4`)."""

from __future__ import annotations

from backend.models.config import ModelConfig
from backend.models.decoder import Decoder
from backend.models.layers import SandwichNormLayer


class GlmForCausalLM(Decoder):
    """GLM 4: Llama with fused gate and up projections, and rotations of neighbouring dimensions."""

    mlp_names = ("gate_up_proj", "down_proj")
    rotates_neighbours = True

    @staticmethod
    def has_output_bias(config: ModelConfig) -> bool:
        return False


class Glm4Layer(SandwichNormLayer):
    """Decoder layer of GLM-4-0414: Gemma's, under other names."""

    norm_names = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414: a norm after each sublayer, too."""

    layer_kind = Glm4Layer
