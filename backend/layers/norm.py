"""RMS norm layer."""

from __future__ import annotations

from torch import Tensor

from backend.ops.base import HeadNorms, Ops
from backend.quantization.base import Linear


class RmsNorm:
    """Root mean square norm over the last dimension."""

    def __init__(self, ops: Ops, weight: Tensor, eps: float) -> None:
        self._ops = ops
        self._weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self._weight, self._eps)

    @staticmethod
    def of_heads(query: RmsNorm, key: RmsNorm) -> HeadNorms:
        """Returns the norms of query and key heads in the form that `Ops.norm_rope_store` takes."""
        return HeadNorms(query._weight, key._weight, query._eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns norm(x + residual) and x + residual, the new residual. A residual of None counts as zero."""
        if residual is None:
            return self(x), x
        return self._ops.add_rms_norm(x, residual, self._weight, self._eps)

    def then(self, linear: Linear, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns linear(norm(x + residual)) and x + residual, as `add`. Some layers compute both in one kernel."""
        if (fused := linear.after_norm(x, residual, self._weight, self._eps)) is not None:
            return fused
        normed, residual = self.add(x, residual)
        return linear(normed), residual
