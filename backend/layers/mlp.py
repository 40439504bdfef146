"""MLP layers: the gated MLP and the mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from torch import Tensor

from backend.layers.gates import Gate
from backend.layers.loader import LayerLoader
from backend.layers.lora import AdapterRows, LoraLinear
from backend.layers.norm import RmsNorm
from backend.models.config import ModelConfig
from backend.ops.base import Ops
from backend.ops.experts import Expert, LinearWeight
from backend.quantization.base import Linear

PLAIN_NAMES = ("gate_proj", "up_proj", "down_proj")

L = TypeVar("L", Linear, LoraLinear)


class Mlp:
    """An expert: computes down(gate_up(x)). The layer `gate_up` also applies the gate."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._layers = gate_up, down
        self._gate_up, self._down = gate_up.pass_gate_to(down)

    @property
    def weights(self) -> tuple[LinearWeight, LinearWeight] | None:
        """Weights of the two layers, as `Expert.weights` defines them."""
        gate_up, down = (layer.packed_weight for layer in self._layers)
        return (gate_up, down) if gate_up and down else None

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._down(self._gate_up(hidden))


class GatedMlp(Mlp):
    """An expert that computes down(activation(gate(x)) * up(x)).

    `names` are the checkpoint's names of gate, up and down, or two names if it stores gate and up as one tensor.
    """

    def __init__(
        self, config: ModelConfig, loader: LayerLoader, inner_size: int, names: tuple[str, ...] = PLAIN_NAMES
    ) -> None:
        super().__init__(*_gated(loader.linear, config, inner_size, names))


class DenseMlp:
    """The MLP of a layer without experts: computes the same as `GatedMlp`, and adapters may change it."""

    needs_host_sync: ClassVar[bool] = False

    def __init__(
        self, config: ModelConfig, loader: LayerLoader, inner_size: int, names: tuple[str, ...] = PLAIN_NAMES
    ) -> None:
        self._layers = _gated(loader.adaptable, config, inner_size, names)
        gate_up, down = self._layers
        self._without_adapters = gate_up.pass_gate_to(down)

    @property
    def lora_layers(self) -> tuple[LoraLinear, ...]:
        """The linear layers that adapters may change."""
        return self._layers

    def __call__(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        gate_up, down = self._layers if adapters else self._without_adapters
        return down(gate_up(hidden, adapters), adapters)

    def after_norm(
        self, norm: RmsNorm, delta: Tensor, residual: Tensor, adapters: AdapterRows | None
    ) -> tuple[Tensor, Tensor]:
        """Computes the layer of norm(delta + residual). Returns its result and delta + residual."""
        gate_up, down = self._layers if adapters else self._without_adapters
        inner, residual = gate_up.after_norm(norm, delta, residual, adapters)
        return down(inner, adapters), residual


def _gated(make: Callable[..., L], config: ModelConfig, inner_size: int, names: tuple[str, ...]) -> tuple[L, L]:
    """Creates the two layers of a gated MLP by one of the loader's methods."""
    *gate_up, down = names
    outs = [(name, 2 * inner_size // len(gate_up)) for name in gate_up]
    return (
        make(outs, config.hidden_size, bias=config.mlp_bias, gate=config.activation),
        make([(down, config.hidden_size)], inner_size, bias=config.mlp_bias),
    )


class SparseMlp:
    """Mixture of experts: a gate that selects a few of many small MLPs for each token.

    `shared` is an MLP for all tokens, whose output is added. Adapters can change it, but not the others.
    """

    def __init__(self, ops: Ops, gate: Gate, mlps: Sequence[Expert], shared: DenseMlp | None = None) -> None:
        self._ops = ops
        self._gate = gate
        self._mixture = ops.mixture_of_experts(mlps)
        self._shared = shared

    @property
    def lora_layers(self) -> tuple[LoraLinear, ...]:
        """The linear layers that adapters may change."""
        return () if self._shared is None else self._shared.lora_layers

    @property
    def needs_host_sync(self) -> bool:
        """Whether a step waits for the device in this layer, as in `MixtureOfExperts`."""
        return self._mixture.needs_host_sync

    def __call__(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        routed = self._mixture(hidden, *self._gate(hidden))
        return routed if self._shared is None else self._ops.add(routed, self._shared(hidden, adapters))

    def after_norm(
        self, norm: RmsNorm, delta: Tensor, residual: Tensor, adapters: AdapterRows | None
    ) -> tuple[Tensor, Tensor]:
        """As `DenseMlp.after_norm`."""
        normed, residual = norm.add(delta, residual)
        return self(normed, adapters), residual
