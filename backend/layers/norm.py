"""RMS norm layer."""

from __future__ import annotations

from torch import Tensor

from backend.ops.base import HeadNorms, Ops
from backend.quantization.base import Linear


class RmsNorm:
    """Root mean square norm over the last dimension."""

    def __init__(self, ops: Ops, weight: Tensor, eps: float) -> None:
        self.ops = ops
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    @staticmethod
    def of_heads(query: RmsNorm, key: RmsNorm) -> HeadNorms:
        """Returns the norms of query and key heads in the form that `Ops.norm_rope_store` takes."""
        return HeadNorms(query.weight, key.weight, query.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns norm(x + residual) and x + residual, the new residual. A residual of None counts as zero."""
        if residual is None:
            return self(x), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)

    def then(self, linear: Linear, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns linear(norm(x + residual)) and x + residual, as `add`. Some layers compute both in one kernel."""
        if (fused := linear.after_norm(x, residual, self.weight, self.eps)) is not None:
            return fused
        normed, residual = self.add(x, residual)
        return linear(normed), residual
