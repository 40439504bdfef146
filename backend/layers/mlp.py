"""MLP layers: the gated MLP and the mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from backend.layers.loader import LayerLoader
from backend.layers.norm import RmsNorm
from backend.models.config import ExpertsConfig, ModelConfig
from backend.ops.base import Ops
from backend.ops.experts import Expert, LinearWeight
from backend.quantization.base import Linear

PLAIN_NAMES = ("gate_proj", "up_proj", "down_proj")


class Mlp:
    """Computes down(gate_up(x)). The layer `gate_up` also applies the gate."""

    needs_host_sync: ClassVar[bool] = False

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up
        self._down = down

    @property
    def weights(self) -> tuple[LinearWeight, LinearWeight] | None:
        """Weights of the two layers, as `Expert.weights` defines them."""
        gate_up, down = self._gate_up.packed_weight, self._down.packed_weight
        return (gate_up, down) if gate_up and down else None

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._down(self._gate_up(hidden))

    def after_norm(self, norm: RmsNorm, delta: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the layer of norm(delta + residual). Returns its result and delta + residual."""
        inner, residual = norm.then(self._gate_up, delta, residual)
        return self._down(inner), residual


class GatedMlp(Mlp):
    """Computes down(activation(gate(x)) * up(x)).

    `names` are the checkpoint's names of gate, up and down, or two names if it stores gate and up as one tensor.
    """

    def __init__(
        self, config: ModelConfig, loader: LayerLoader, inner_size: int, names: tuple[str, ...] = PLAIN_NAMES
    ) -> None:
        *gate_up, down = names
        outs = [(name, 2 * inner_size // len(gate_up)) for name in gate_up]
        super().__init__(
            loader.linear(outs, config.hidden_size, bias=config.mlp_bias, gate=config.activation),
            loader.linear([(down, config.hidden_size)], inner_size, bias=config.mlp_bias),
        )


class SparseMlp:
    """Mixture of experts: a router that selects a few of many small MLPs for each token."""

    def __init__(self, ops: Ops, experts: ExpertsConfig, router: Linear, mlps: Sequence[Expert]) -> None:
        self._ops = ops
        self._experts = experts
        self._router = router
        self._mixture = ops.mixture_of_experts(mlps)

    @property
    def needs_host_sync(self) -> bool:
        """Whether a step waits for the device in this layer, as in `MixtureOfExperts`."""
        return self._mixture.needs_host_sync

    def __call__(self, hidden: Tensor) -> Tensor:
        shares, chosen = self._ops.route(self._router(hidden), self._experts.num_per_token, self._experts.normalise)
        return self._mixture(hidden, shares, chosen)

    def after_norm(self, norm: RmsNorm, delta: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """As `Mlp.after_norm`."""
        normed, residual = norm.add(delta, residual)
        return self(normed), residual
