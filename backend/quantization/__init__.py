"""How the weight of a linear layer is held in memory and multiplied: a family of quantizations, chosen by name.

It may import `backend.ops`, `backend.model_files` (for weights in MXFP4) and the engine's errors. Begin at base.py.
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


def create_quantization(name: str, ops: Ops) -> Quantization:
    """The quantization with this name. `ops` computes its products."""
    return cast("Quantization", load_member(QUANTIZATIONS, name)(ops))
