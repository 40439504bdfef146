from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backend.ops import OPS, create_ops
from backend.ops.base import Ops
from backend.triton_runtime import runs_triton
from tests.backend.levels import LEVELS, native_ops

RUN = {"native": bool(LEVELS), "triton": runs_triton(torch.device("cpu"))}  # the others always run
MEMBERS = [*(name for name in OPS if RUN.get(name, True)), *(f"native {name}" for name in LEVELS)]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(scope="module", params=MEMBERS)
def ops(request: pytest.FixtureRequest) -> Ops:
    """Every member of `Ops`, and the native one at every level of instruction sets."""
    name, _, level = request.param.partition(" ")
    return native_ops(level) if level else create_ops(name)
