"""Gates of mixtures of experts: they choose the experts of each token, and the weights of the experts' outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from backend.layers.loader import LayerLoader
from backend.models.config import ExpertsConfig
from backend.models.deepseek_config import GateConfig
from backend.ops.base import Ops
from backend.quantization.base import Linear

SMALLEST_SUM = 1e-20  # added to a sum of weights by which they are divided, as in training


class Gate(ABC):
    """Base class of gates."""

    @abstractmethod
    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights and numbers of each token's experts.

        hidden: [T, hidden_size] -> weights [T, K] float32 and numbers [T, K] int64.
        """


class TopKGate(Gate):
    """Chooses the experts with the largest scores. Weights are a softmax, as `Ops.route` computes it."""

    def __init__(self, ops: Ops, experts: ExpertsConfig, router: Linear) -> None:
        self._ops = ops
        self._experts = experts
        self._router = router

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self._ops.route(self._router(hidden), self._experts.num_per_token, self._experts.normalise)


class GroupedGate(Gate):
    """DeepSeek's gate: experts are chosen from the best groups only, so that a token needs few devices in training.

    Everything is computed in float32, the router included, because the differences between scores are small.
    """

    def __init__(self, experts: ExpertsConfig, gate: GateConfig, hidden_size: int, loader: LayerLoader) -> None:
        """Takes the weight of the router `gate` and the bias of its scores. Raises `WeightsError`."""
        self._experts = experts
        self._gate = gate
        num_experts, dtype = experts.num_experts, torch.float32
        self._router = loader.router("gate", num_experts, hidden_size, dtype=dtype)
        self._bias: Tensor | None = None
        if gate.has_bias:
            name = f"{loader.prefix}gate.e_score_correction_bias"
            self._bias = loader.checkpoint.take(name, num_experts, dtype=dtype)

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        results = self._router(hidden.float())
        scores = _sigmoid(results) if self._gate.scoring == "sigmoid" else results.softmax(-1)
        preferences = self._within_groups(scores if self._bias is None else scores + self._bias)
        chosen = preferences.topk(self._experts.num_per_token, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self._experts.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
        return weights * self._gate.scale, chosen

    def _within_groups(self, preferences: Tensor) -> Tensor:
        """Sets the preferences [T, E] for experts outside of each token's best groups to -inf."""
        gate = self._gate
        if gate.groups_per_token == gate.num_groups:
            return preferences
        groups = preferences.view(len(preferences), gate.num_groups, -1)  # [T, G, E / G]
        totals = groups.topk(gate.best_per_group, dim=-1).values.sum(-1)
        best = totals.topk(gate.groups_per_token, dim=-1).indices
        is_left_out = torch.ones_like(totals, dtype=torch.bool).scatter_(1, best, 0)
        return groups.masked_fill(is_left_out[..., None], -torch.inf).flatten(1)


def _sigmoid(x: Tensor) -> Tensor:
    """The sigmoid as a softmax over x and 0.

    torch's own sigmoid rounds the last numbers of a tensor differently, so a row would depend on its batch.
    """
    return torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(-1)[..., 0]
