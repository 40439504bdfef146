from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from backend.layers.loader import LayerLoader
from backend.models.config import ExpertsConfig, ModelConfig
from backend.quantization.base import Linear

PLAIN_NAMES = ("gate_proj", "up_proj", "down_proj")


class GatedMlp:
    """down(activation(gate(x)) * up(x)). `names` are the checkpoint's for the three; where it keeps gate and up as one,
    there are two."""

    def __init__(
        self, config: ModelConfig, loader: LayerLoader, inner_size: int, names: tuple[str, ...] = PLAIN_NAMES
    ) -> None:
        *gate_up, down = names
        outs = [(name, 2 * inner_size // len(gate_up)) for name in gate_up]
        self._gate_up = loader.linear(outs, config.hidden_size, bias=config.mlp_bias, gate=config.activation)
        self._down = loader.linear([(down, config.hidden_size)], inner_size, bias=config.mlp_bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._down(self._gate_up(hidden))


class SparseMlp:
    """A router and many small MLPs, of which each token visits a few.

    A token's result is summed in the order of the experts' numbers, whatever its neighbours visit.
    """

    def __init__(self, experts: ExpertsConfig, router: Linear, mlps: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self._experts = experts
        self._router = router
        self._mlps = mlps

    def __call__(self, hidden: Tensor) -> Tensor:
        shares = self._router(hidden).float().softmax(-1)
        weights, chosen = shares.topk(self._experts.num_per_token, dim=-1)  # [T, K]
        if self._experts.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(hidden.dtype)
        output = torch.zeros_like(hidden)
        for expert in sorted(set(chosen.flatten().tolist())):
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            result = self._mlps[expert](hidden[tokens]) * weights[tokens, places, None]
            output.index_add_(0, tokens, result)
        return output
