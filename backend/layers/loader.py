"""Creates layers from the tensors of a checkpoint, in the selected quantization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backend.layers.division import WHOLE, Division
from backend.layers.lora import LoraLinear, modules_of
from backend.layers.norm import RmsNorm
from backend.model_files.quantized_tensor import concatenated, dequantized
from backend.models.weights import Checkpoint
from backend.ops.base import Ops
from backend.quantization.base import Linear, Quantization
from backend.quantization.none import PlainLinear

NO_ORDERS: Mapping[str, Tensor] = {}


@dataclass(frozen=True, slots=True)
class LayerLoader:
    """Creates layers from the tensors whose names start with `prefix`. Raises `WeightsError`."""

    checkpoint: Checkpoint
    ops: Ops
    quantization: Quantization
    division: Division = WHOLE
    prefix: str = ""
    norm_offset: float = 0.0  # added to norm weights, for checkpoints that store the difference from an offset

    def with_norm_offset(self, norm_offset: float) -> LayerLoader:
        """Returns a loader that adds `norm_offset` to norm weights."""
        return replace(self, norm_offset=norm_offset)

    def below(self, name: str) -> LayerLoader:
        """Returns a loader for the tensors of the submodule `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def linear(
        self,
        outs: Sequence[tuple[str, int]],
        in_features: int,
        *,
        bias: bool = False,
        gate: str | None = None,
        orders: Mapping[str, Tensor] = NO_ORDERS,
    ) -> Linear:
        """Creates one fused linear layer from several (name, out_features) that have the same input.

        The fused layer reads its input once and launches one kernel. `orders`: the outputs of some names in another
        order than the checkpoint's, as indexes of it.
        """
        weights = [self.checkpoint.take_packed(f"{self.prefix}{name}.weight", out, in_features) for name, out in outs]
        biases = [self.tensor(f"{name}.bias", out) for name, out in outs] if bias else []
        for i, (name, _) in enumerate(outs):
            if (order := orders.get(name)) is not None:
                weights[i] = dequantized(weights[i])[order]
                biases[i : i + 1] = [bias_of[order] for bias_of in biases[i : i + 1]]
        return self.quantization.linear(concatenated(weights), torch.cat(biases) if bias else None, gate)

    def adaptable(
        self,
        outs: Sequence[tuple[str, int]],
        in_features: int,
        *,
        bias: bool = False,
        gate: str | None = None,
        orders: Mapping[str, Tensor] = NO_ORDERS,
    ) -> LoraLinear:
        """Creates a linear layer like `linear`, which LoRA adapters may change."""
        linear = self.linear(outs, in_features, bias=bias, gate=gate, orders=orders)
        return LoraLinear(linear, self.ops, modules_of(self.prefix, outs, in_features, orders), gate)

    def router(
        self, name: str, num_experts: int, in_features: int, *, bias: bool = False, dtype: torch.dtype | None = None
    ) -> Linear:
        """Creates the router of a mixture of experts, in `dtype` or else in the model's dtype.

        The router is never quantized, because it is small and a rounding error can select another expert.
        """
        weight = self.checkpoint.take(f"{self.prefix}{name}.weight", num_experts, in_features, dtype=dtype)
        return PlainLinear(self.ops, weight, self.tensor(f"{name}.bias", num_experts) if bias else None, None)

    def rms_norm(self, name: str, size: int, eps: float) -> RmsNorm:
        """Creates an RMS norm. Adds `norm_offset` to its weights."""
        if self.norm_offset:
            # Added in float32, because bfloat16 is too coarse near one to represent the stored difference.
            weight = self.checkpoint.take(f"{self.prefix}{name}.weight", size, dtype=torch.float32) + self.norm_offset
        else:
            weight = self.tensor(f"{name}.weight", size)
        return RmsNorm(self.ops, weight, eps)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Takes the tensor `name`, which must have this shape, from the checkpoint."""
        return self.checkpoint.take(self.prefix + name, *shape)
