"""Plain torch: runs on every device, and is what every faster member is compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.ops.base import INT4_GROUP, Ops


class ReferenceOps(Ops):
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, gate: str | None = None) -> Tensor:
        return self.gated(F.linear(x, weight, bias), gate)

    def linear_int8(
        self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, gate: str | None = None
    ) -> Tensor:
        return self.gated(F.linear(x, (weight * scales[:, None]).to(x.dtype), bias), gate)

    def linear_int4(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        groups = weight.view(len(weight), -1, INT4_GROUP // 2)
        numbers = torch.cat((groups & 15, groups >> 4), dim=-1).float() - 8  # [out, groups, INT4_GROUP]
        return F.linear(x, (numbers * scales[..., None].float()).flatten(1).to(x.dtype), bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = x + residual
        return self.rms_norm(residual, weight, eps), residual

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def store_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        key_cache.flatten(0, 1).index_copy_(0, slots, key)
        value_cache.flatten(0, 1).index_copy_(0, slots, value)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1)

    def draw(self, logits: Tensor, temperature: Tensor, shares: Tensor) -> Tensor:
        return invert(torch.softmax(logits / temperature[:, None], dim=-1), shares)


def invert(likely: Tensor, shares: Tensor) -> Tensor:
    """The first tokens up to which the likely ones sum to more than their row's share of all.

    likely: [N, vocab_size], at least 0; shares: [N] float64, in [0, 1) -> [N] int64.
    """
    # In double precision the sum is exact enough for every token to have its share, in a vocabulary of any size.
    cumulative = likely.double().cumsum(dim=-1)
    points = shares[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, points, right=True).squeeze(-1)
    return chosen.clamp(max=likely.shape[-1] - 1)  # logits that are no numbers must not lead beyond the vocabulary
