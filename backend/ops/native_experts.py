"""Mixture of experts by the native CPU kernels: one operation computes the complete mixture for any chosen experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from backend.native import library
from backend.native.library import DTYPES, OP_BYTES, Caller
from backend.ops.experts import LinearWeight, MixtureOfExperts

FORMATS = {
    "plain": 0, "int8": 1, "int4": 2, "mxfp4": 3,
    "q8_0": 4, "q4_0": 5, "iq4_nl": 6, "iq4_xs": 7, "q4_k": 8, "q5_k": 9, "q6_k": 10,
}  # fmt: skip
# Inputs per block, and the bytes of a block in a panel: UNIT and UNIT_BYTES of kernels/level/blocks.h.
BLOCK_SIZES = {
    "q8_0": (32, 34), "q4_0": (32, 18), "iq4_nl": (32, 18), "iq4_xs": (256, 138), "q4_k": (256, 148),
    "q5_k": (256, 180), "q6_k": (256, 210),
}  # fmt: skip
GROUPED = frozenset({"int4", "mxfp4"})  # packed weights of these formats contain their scales and apply no gate
GATES = {None: 0, "silu": 1, "gelu_tanh": 2, "swiglu_oai": 3}


class NativeMixtureOfExperts(MixtureOfExperts):
    """Mixture of experts by the native CPU kernels."""

    def __init__(
        self, call: Caller, experts: Sequence[tuple[LinearWeight, LinearWeight]], hidden: int, inner: int
    ) -> None:
        """`hidden` and `inner` are the input sizes of an expert's two linear layers.

        The weights of all experts must have the same format.
        """
        self._call = call
        self._experts = experts  # kept alive, because the table points to their weights
        self._hidden, self._inner, self._num_experts = hidden, inner, len(experts)
        first = experts[0][0]
        self._applies_gate = _is_packed(first) and first.format not in GROUPED
        self._gate = 0 if self._applies_gate else GATES[first.gate]
        products = b"".join(
            self._product(first, 2 * inner, hidden) + self._product(second, hidden, inner) for first, second in experts
        )
        self._products = np.frombuffer(products, dtype=np.uint8).copy()  # aligned for fields of eight bytes

    def _product(self, weight: LinearWeight, outs: int, ins: int) -> bytes:
        """Returns one LINEAR operation of the kernels. The kernels fill in its rows, input and output."""
        is_packed = _is_packed(weight)
        scales = None if is_packed and weight.format in GROUPED else weight.scales
        code, layout = library.LINEAR
        fields = (0, weight.values.data_ptr(), _pointer(scales), _pointer(weight.bias), 0, 0, outs, ins, 0, 0)
        gate = GATES[weight.gate] if self._applies_gate else 0
        out_stride = outs // 2 if gate else outs
        return layout.pack(code, 1, *fields, FORMATS[weight.format], is_packed, gate, out_stride).ljust(OP_BYTES, b"\0")

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        x, weights, chosen = x.contiguous(), weights.contiguous(), chosen.contiguous()
        out = torch.empty_like(x)
        self._call(
            library.EXPERTS,
            x.data_ptr(), chosen.data_ptr(), weights.data_ptr(), self._products.ctypes.data, out.data_ptr(),
            len(x), self._hidden, self._inner, self._num_experts, chosen.shape[1], DTYPES[x.dtype], self._gate,
        )  # fmt: skip
        return out


def _is_packed(weight: LinearWeight) -> bool:
    return weight.values.dim() > 2


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
