"""Operations of a model except attention: matrix multiplications, norms, rotary embeddings and sampling.

This package may import `kv_cache`, `native`, `huge_pages` and `triton_runtime` of `backend`, but neither models nor the
engine. Begin at base.py for the interface, then read reference.py. All implementations compute the same functions; the
other implementations are only faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from backend.families import load_member

if TYPE_CHECKING:
    from backend.ops.base import Ops

OPS = {
    "native": "backend.ops.native:NativeOps",
    "reference": "backend.ops.reference:ReferenceOps",
    "triton": "backend.ops.triton:TritonOps",
}


def create_ops(name: str) -> Ops:
    """Returns the implementation of the operations with this name in `OPS`."""
    return cast("Ops", load_member(OPS, name)())
