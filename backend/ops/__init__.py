"""The operations of a model besides attention, as a family with one interface: products, norms, rotary, sampling.

It may import `kv_cache`, `native`, `huge_pages` and `triton_runtime` of `backend`, but neither models nor the engine.
Begin at base.py, then reference.py: every member computes the same functions, and the others are only faster.
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
    """The member with this name."""
    return cast("Ops", load_member(OPS, name)())
