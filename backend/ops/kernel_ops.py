"""`KernelOps`: what implementations have in common whose norms are one kernel, and whose gated activations are another.

The native kernels and the Triton kernels are such implementations.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from backend.ops.reference import ReferenceOps


class KernelOps(ReferenceOps):
    """Implements the norms by `_norm`, and the gated activations by `_gated`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total = self._norm(x, residual, weight, eps)
        assert total is not None
        return normed, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, "silu")

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, "gelu_tanh")

    def swiglu_oai(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, "swiglu_oai")

    @abstractmethod
    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
        """Returns the norm of x, or of x + residual, and that sum. The sum is None without a residual."""

    @abstractmethod
    def _gated(self, gate_up: Tensor, gate: str) -> Tensor:
        """Returns the activation of the gate, the first half of each row, times the second half."""
