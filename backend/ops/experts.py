"""Interface of mixtures of experts: a router chooses a few of many MLPs per token, and their outputs are added."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """Weight, bias and gate of a linear layer. `format` selects `Ops.linear`, or its int8, int4, mxfp4 or blocks form.

    The format "fp8" is eight-bit floats (e4m3) with scales as for int8. `Ops` has no method for it, but a mixture of
    experts may support it.
    """

    format: str  # "plain", "int8", "int4", "mxfp4", "fp8" or a block type of gguf_blocks.py
    values: Tensor  # packed, if the implementation of `Ops` packs weights
    scales: Tensor | None
    bias: Tensor | None
    gate: str | None


class Expert(Protocol):
    """One MLP of a mixture of experts."""

    @property
    def weights(self) -> tuple[LinearWeight, LinearWeight] | None:
        """The weights of the gated linear layer and of the linear layer after it. None for any other kind of expert."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Computes the expert for each row: [N, D] -> [N, D]."""


class MixtureOfExperts(ABC):
    """Base class of mixtures of experts. A layer refers to its mixture instead of to the experts."""

    needs_host_sync: ClassVar[bool] = False  # if true, a step waits for the device in its middle; no graph capture

    @abstractmethod
    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Returns the weighted sum of the outputs of each token's experts, [T, D] in x's dtype.

        x: [T, D]. weights: [T, K] float32. chosen: [T, K] int64, the numbers of K different experts per row. An
        implementation must add the outputs in the order of the experts' numbers, so all batches give equal results.
        """


class SequentialExperts(MixtureOfExperts):
    """Calls one expert after the other with the rows that chose it. The host must know these rows."""

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
