"""The arithmetic between the matrix products, by name. Every member computes the same functions; some faster."""

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
    return cast("Ops", load_member(OPS, name)())
