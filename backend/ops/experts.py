"""A mixture of experts: many MLPs, of which each token visits a few, and the sum of what those say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """What a product takes beside its input: that of `Ops.linear`, `linear_int8`, `linear_int4` or `linear_mxfp4`; or
    in eight-bit floats (e4m3) with scales as those of int8, of which `Ops` has no product."""

    form: Literal["plain", "int8", "int4", "mxfp4", "fp8"]
    numbers: Tensor  # packed, if the member of `Ops` packs them
    scales: Tensor | None
    bias: Tensor | None
    gate: str | None


class Expert(Protocol):
    @property
    def weights(self) -> tuple[LinearWeight, LinearWeight] | None:
        """Of the gated product and of the one behind it; None where the expert is made of anything else."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """[N, D] -> [N, D], row by row."""


class MixtureOfExperts(ABC):
    """Held by a model's layer in place of the experts themselves."""

    needs_host_sync: ClassVar[bool] = False  # in the middle of a step, which then can not be captured

    @abstractmethod
    def __call__(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """The sum of each token's experts, each times its share, in the order of their numbers whatever the token's
        neighbours visit. x: [T, D]; shares: [T, K] float32; chosen: [T, K] int64, of which each token's are different
        -> [T, D] in x's dtype."""


class SequentialExperts(MixtureOfExperts):
    """By asking each expert for the rows of those who visit it. It has to know who does before it can go on."""

    needs_host_sync = True

    def __init__(self, experts: Sequence[Expert]) -> None:
        self._experts = experts

    def __call__(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        shares = shares.to(x.dtype)
        output = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            output.index_add_(0, tokens, self._experts[expert](x[tokens]) * shares[tokens, places, None])
        return output
