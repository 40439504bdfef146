"""Quantizations: formats in which linear layers store and multiply their weights, named as by `--quantization`.

This package may import `backend.ops`, `backend.model_files` (for weights in MXFP4) and the engine's errors. Begin at
base.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from backend.families import load_member

if TYPE_CHECKING:
    from backend.ops.base import Ops
    from backend.quantization.base import Quantization

QUANTIZATIONS = {
    "fp8": "backend.quantization.fp8:Fp8",
    "int4": "backend.quantization.int4:Int4",
    "int8": "backend.quantization.int8:Int8",
    "none": "backend.quantization.none:Unquantized",
}


def bits_per_weight(name: str) -> float | None:
    """Returns the memory of one number of a linear layer's weight in bits, or None if it is that of the dtype."""
    return cast("type[Quantization]", load_member(QUANTIZATIONS, name)).bits


def create_quantization(name: str, ops: Ops) -> Quantization:
    """Returns the quantization with this name in `QUANTIZATIONS`. `ops` computes its matrix multiplications."""
    return cast("Quantization", load_member(QUANTIZATIONS, name)(ops))
