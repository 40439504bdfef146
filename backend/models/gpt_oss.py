from __future__ import annotations

import torch
from torch import Tensor

from backend.layers.loader import LayerLoader
from backend.layers.mlp import Mlp, SparseMlp
from backend.layers.mxfp4 import BLOCK, dequantise_mxfp4
from backend.models.config import ExpertsConfig, ModelConfig
from backend.models.decoder import Decoder


class GptOssForCausalLM(Decoder):
    """Experts with biases and a clamped gate, kept as one tensor for all of them. Sinks, windows and rotation stand in
    config.json."""

    @classmethod
    def sparse_mlp(cls, config: ModelConfig, experts: ExpertsConfig, layer: LayerLoader) -> SparseMlp:
        loader = layer.below("mlp")
        inner, size = experts.intermediate_size, config.hidden_size
        gate_up = _stacked(loader.below("experts"), "gate_up_proj", experts.num_experts, size, 2 * inner)
        gate_up_bias = loader.tensor("experts.gate_up_proj_bias", experts.num_experts, 2 * inner)
        down = _stacked(loader.below("experts"), "down_proj", experts.num_experts, inner, size)
        down_bias = loader.tensor("experts.down_proj_bias", experts.num_experts, size)
        linear = loader.quantization.linear
        mlps = [
            # Rows of gate and up stand in turns; here one after the other, as in every other family.
            Mlp(linear(_in_turn(gate_up[i]), _in_turn(gate_up_bias[i]), "swiglu_oai"), linear(down[i], down_bias[i]))
            for i in range(experts.num_experts)
        ]
        return SparseMlp(loader.ops, experts, loader.router("router", experts.num_experts, size, bias=True), mlps)


def _in_turn(rows: Tensor) -> Tensor:
    return torch.cat((rows[0::2], rows[1::2]))


def _stacked(loader: LayerLoader, name: str, num_experts: int, ins: int, outs: int) -> Tensor:
    """[num_experts, outs, ins]: from MXFP4, or from what transformers saves, which is [num_experts, ins, outs]."""
    checkpoint, whole = loader.checkpoint, f"{loader.prefix}{name}"
    if whole in checkpoint:
        return checkpoint.take(whole, num_experts, ins, outs).transpose(1, 2).contiguous()
    shape = (num_experts, outs, ins // BLOCK)
    blocks = checkpoint.take(f"{whole}_blocks", *shape, BLOCK // 2, dtype=torch.uint8)
    scales = checkpoint.take(f"{whole}_scales", *shape, dtype=torch.uint8)
    return dequantise_mxfp4(blocks, scales, checkpoint.dtype)
