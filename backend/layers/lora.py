"""LoRA adapters: the product of two narrow matrices, added to the result of a linear layer.

For the tokens of a request that uses an adapter, a layer with the weight W returns W x + s B A x, with A [rank, in],
B [out, rank] and the adapter's scale s (Hu et al. 2021, arXiv 2106.09685). W may be quantized and is never changed, so
one step serves several adapters and requests without one: the rows of a step are grouped by adapter (`AdapterRows`),
and each group takes two small matrix multiplications per module. A step without adapters computes as if there were
none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from backend.engine.adapter import Adapter
from backend.layers.norm import RmsNorm
from backend.ops.base import Ops
from backend.quantization.base import Linear

# Rows of a step: neighbours, or indexes [n] int64 in ascending order.
Rows = slice | Tensor


class LoraTarget(NamedTuple):
    """A module that adapters may change: some outputs of a linear layer, which may fuse several modules."""

    layer: str  # the name of the linear layer
    first: int  # of its outputs, the first one of this module
    outs: int
    ins: int
    order: Tensor | None  # the module's outputs in the order of the layer's, if it is another than the checkpoint's


class LoraPart(NamedTuple):
    """What an adapter adds to the outputs of one module."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank], multiplied by the adapter's scale
    first: int  # as in `LoraTarget`


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter(Adapter):
    """A loaded LoRA adapter."""

    parts: Mapping[str, Sequence[LoraPart]]  # by the name of a linear layer


class AdapterRows:
    """The rows of a step that use adapters, grouped by adapter."""

    def __init__(self, groups: Sequence[tuple[LoraAdapter, Rows]]) -> None:
        self._groups = groups

    @staticmethod
    def of(adapters: Sequence[Adapter | None], counts: Sequence[int], device: torch.device) -> AdapterRows | None:
        """Groups the rows of sequences that have so many rows each, one after the other. None if there are no groups.

        adapters: that of each sequence.
        """
        rows: dict[LoraAdapter, list[int]] = {}
        end = 0
        for adapter, count in zip(adapters, counts, strict=True):
            begin, end = end, end + count
            if adapter is not None and count:
                assert isinstance(adapter, LoraAdapter)
                rows.setdefault(adapter, []).extend(range(begin, end))
        if not rows:
            return None
        return AdapterRows([(adapter, _indexes(own, device)) for adapter, own in rows.items()])

    def parts_of(self, layer: str) -> list[tuple[Rows, Sequence[LoraPart]]]:
        """The groups' rows, each with what is added to this layer's outputs, for adapters that change the layer."""
        return [(rows, adapter.parts[layer]) for adapter, rows in self._groups if layer in adapter.parts]


def _indexes(rows: Sequence[int], device: torch.device) -> Rows:
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, dtype=torch.int64, device=device)


class LoraLinear:
    """A linear layer that adapters may change. `linear` computes it without them."""

    def __init__(self, linear: Linear, ops: Ops, targets: Mapping[str, LoraTarget], gate: str | None) -> None:
        """targets: the modules by their names, which all name the same layer."""
        self.targets = targets
        self._name = next(iter(targets.values())).layer
        self._linear = linear
        self._ops = ops
        self._gate = gate

    def pass_gate_to(self, following: LoraLinear) -> tuple[LoraLinear, LoraLinear]:
        """As `Linear.pass_gate_to`, for steps without adapters."""
        pair = copy(self), copy(following)
        pair[0]._linear, pair[1]._linear = self._linear.pass_gate_to(following._linear)
        return pair

    def __call__(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Computes the layer: x [T, in] -> [T, out], or [T, out / 2] with a gate."""
        changes = adapters.parts_of(self._name) if adapters else None
        return self._changed(x, changes) if changes else self._linear(x)

    def after_norm(
        self, norm: RmsNorm, x: Tensor, residual: Tensor | None, adapters: AdapterRows | None
    ) -> tuple[Tensor, Tensor]:
        """Computes the layer of norm(x + residual), as `RmsNorm.then`."""
        changes = adapters.parts_of(self._name) if adapters else None
        if not changes:
            return norm.then(self._linear, x, residual)
        normed, residual = norm.add(x, residual)
        return self._changed(normed, changes), residual

    def _changed(self, x: Tensor, changes: Sequence[tuple[Rows, Sequence[LoraPart]]]) -> Tensor:
        out = self._linear.ungated(x)
        for rows, parts in changes:
            own = x[rows]
            for a, b, first in parts:
                added = self._ops.linear(self._ops.linear(own, a, None), b, None)
                module = out.narrow(1, first, len(b))
                if isinstance(rows, slice):
                    module[rows].add_(added)
                else:
                    module.index_add_(0, rows, added)
        return self._ops.gated(out, self._gate)


def modules_of(
    prefix: str, outs: Sequence[tuple[str, int]], ins: int, orders: Mapping[str, Tensor]
) -> dict[str, LoraTarget]:
    """The targets of one fused linear layer, by module name, for the arguments of `LayerLoader.linear`."""

    def each() -> Iterator[tuple[str, LoraTarget]]:
        first = 0
        for name, size in outs:
            yield f"{prefix}{name}", LoraTarget(f"{prefix}{outs[0][0]}", first, size, ins, orders.get(name))
            first += size

    return dict(each())
