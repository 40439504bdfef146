"""gpt-oss."""

from __future__ import annotations

import torch

from backend.layers.gates import TopKGate
from backend.layers.loader import LayerLoader
from backend.layers.mlp import PLAIN_NAMES, Mlp, SparseMlp
from backend.model_files.mxfp4 import GROUP, Mxfp4Tensor
from backend.model_files.quantized_tensor import StoredTensor, concatenated, dequantized
from backend.models.config import ExpertsConfig, ModelConfig
from backend.models.decoder import Decoder

ACTIVATION = "swiglu_oai"


class GptOssForCausalLM(Decoder):
    """gpt-oss: a mixture of experts with biases and a clamped gate, and attention sinks.

    A model directory stores the experts of a layer as one tensor in which rows of gate and up alternate. The GGUF
    reader provides each expert separately. Attention sinks, windows and rotary embeddings come from config.json.
    """

    @classmethod
    def sparse_mlp(cls, config: ModelConfig, experts: ExpertsConfig, layer: LayerLoader) -> SparseMlp:
        loader = layer.below("mlp")
        stored = loader.below("experts")
        are_separate = f"{stored.prefix}0.{PLAIN_NAMES[-1]}.weight" in stored.checkpoint
        mlps = (_separate_experts if are_separate else _stacked_experts)(stored, experts, config.hidden_size)
        router = loader.router("router", experts.num_experts, config.hidden_size, bias=True)
        return SparseMlp(loader.ops, TopKGate(loader.ops, experts, router), mlps)


def _separate_experts(loader: LayerLoader, experts: ExpertsConfig, size: int) -> list[Mlp]:
    inner = experts.intermediate_size
    *gate_up, down = PLAIN_NAMES
    return [
        Mlp(
            expert.linear([(name, inner) for name in gate_up], size, bias=True, gate=ACTIVATION),
            expert.linear([(down, size)], inner, bias=True),
        )
        for expert in (loader.below(str(i)) for i in range(experts.num_experts))
    ]


def _stacked_experts(loader: LayerLoader, experts: ExpertsConfig, size: int) -> list[Mlp]:
    inner = experts.intermediate_size
    gate_up = _stacked(loader, "gate_up_proj", experts.num_experts, size, 2 * inner)
    gate_up_bias = loader.tensor("gate_up_proj_bias", experts.num_experts, 2 * inner)
    down = _stacked(loader, "down_proj", experts.num_experts, inner, size)
    down_bias = loader.tensor("down_proj_bias", experts.num_experts, size)
    linear = loader.quantization.linear
    return [
        # All rows of gate, then all rows of up, as in all other architectures.
        Mlp(
            linear(_deinterleaved(gate_up[i]), dequantized(_deinterleaved(gate_up_bias[i])), ACTIVATION),
            linear(down[i], down_bias[i]),
        )
        for i in range(experts.num_experts)
    ]


def _deinterleaved(rows: StoredTensor) -> StoredTensor:
    return concatenated((rows[0::2], rows[1::2]))


def _stacked(loader: LayerLoader, name: str, num_experts: int, ins: int, outs: int) -> StoredTensor:
    """Reads the experts' weights as [num_experts, outs, ins].

    The checkpoint has them in MXFP4, or in transformers' layout [num_experts, ins, outs].
    """
    checkpoint, whole = loader.checkpoint, f"{loader.prefix}{name}"
    if whole in checkpoint:
        return checkpoint.take(whole, num_experts, ins, outs).transpose(1, 2).contiguous()
    shape = (num_experts, outs, ins // GROUP)
    blocks = checkpoint.take(f"{whole}_blocks", *shape, GROUP // 2, dtype=torch.uint8)
    scales = checkpoint.take(f"{whole}_scales", *shape, dtype=torch.uint8)
    return Mxfp4Tensor.from_adjacent_pairs(blocks, scales).to(blocks.device, checkpoint.dtype)
