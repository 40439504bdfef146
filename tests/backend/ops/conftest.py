from __future__ import annotations

import pytest
import torch

from backend.native import library
from backend.ops import OPS, create_ops
from backend.ops.base import Ops
from backend.ops.native import NativeOps
from backend.triton_runtime import runs_triton

LEVELS = loaded.level_names if (loaded := library.load()) else ()
RUN = {"native": bool(LEVELS), "triton": runs_triton(torch.device("cpu"))}  # others always do
MEMBERS = [*(name for name in OPS if RUN.get(name, True)), *(f"native {name}" for name in LEVELS)]


@pytest.fixture(scope="module", params=MEMBERS)
def ops(request: pytest.FixtureRequest) -> Ops:
    """Every member, and the native one at every level of instructions that this CPU has."""
    name, _, level = request.param.partition(" ")
    return NativeOps(level_name=level) if level else create_ops(name)
