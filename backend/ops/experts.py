"""Mixtures of experts: many MLPs of which each token uses a few, chosen by a router. The result is a weighted sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """The arguments of a product besides its input, and which one: `Ops.linear`, or its int8, int4 or mxfp4 form.

    "fp8" is eight-bit floats (e4m3) with scales as for int8. `Ops` has no product for it, but a mixture may.
    """

    format: Literal["plain", "int8", "int4", "mxfp4", "fp8"]
    values: Tensor  # packed, if the member of `Ops` packs them
    scales: Tensor | None
    bias: Tensor | None
    gate: str | None


class Expert(Protocol):
    """One MLP of a mixture."""

    @property
    def weights(self) -> tuple[LinearWeight, LinearWeight] | None:
        """The weights of the gated product and of the one after it. None if the expert consists of anything else."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """[N, D] -> [N, D], row by row."""


class MixtureOfExperts(ABC):
    """All experts of one layer. The layer holds this in place of the experts themselves."""

    needs_host_sync: ClassVar[bool] = False  # if so, a step waits for the device in its middle and cannot be captured

    @abstractmethod
    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The weighted sum of each token's experts, added in the order of the experts' numbers in every batch.

        x: [T, D]; weights: [T, K] float32; chosen: [T, K] int64, different in each row -> [T, D] in x's dtype.
        """


class SequentialExperts(MixtureOfExperts):
    """Calls one expert after the other with the rows that chose it, which must be known on the host."""

    needs_host_sync = True

    def __init__(self, experts: Sequence[Expert]) -> None:
        self._experts = experts

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        weights = weights.to(x.dtype)
        output = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            output.index_add_(0, tokens, self._experts[expert](x[tokens]) * weights[tokens, places, None])
        return output
