"""Model architectures DeepSeek V2 (also V2-Lite and V2.5) and V3 (also R1, Moonlight and Kimi K2)."""

from __future__ import annotations

from backend.layers.gates import GroupedGate
from backend.layers.latent_attention import LatentAttention
from backend.layers.loader import LayerLoader
from backend.layers.mlp import DenseMlp, SparseMlp
from backend.models.config import ExpertsConfig, LayerConfig, ModelConfig
from backend.models.decoder import Decoder


class DeepseekForCausalLM(Decoder):
    """DeepSeek V2 and V3: latent attention, and experts with a gate of their own beside shared experts.

    V2 and V3 differ only in the gate, whose settings `backend.models.deepseek_config` reads.
    """

    def attention(self, config: ModelConfig, layer: LayerConfig, loader: LayerLoader) -> LatentAttention:
        assert config.latent is not None and layer.rope_index is not None
        return LatentAttention(config, config.latent, layer.rope_index, loader)

    @classmethod
    def sparse_mlp(cls, config: ModelConfig, experts: ExpertsConfig, layer: LayerLoader) -> SparseMlp:
        loader = layer.below(cls.sparse_name)
        assert experts.gate is not None
        gate = GroupedGate(experts, experts.gate, config.hidden_size, loader)
        shared = None
        if experts.shared_size:
            shared = DenseMlp(config, loader.below("shared_experts"), experts.shared_size)
        return SparseMlp(loader.ops, gate, cls.experts(config, experts, loader), shared)
