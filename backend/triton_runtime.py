"""Detects whether Triton kernels can run: on a GPU if Triton is installed, and in tests by Triton's interpreter."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

HAS_TRITON = find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether TRITON_INTERPRET was set when Triton was imported."""
    return HAS_TRITON and bool(import_module("triton.knobs").runtime.interpret)


def runs_triton(device: torch.device) -> bool:
    """Whether Triton kernels can run on this device."""
    return (HAS_TRITON and device.type == "cuda") or is_interpreted()


def operands(dtype: torch.dtype) -> Any:
    """Returns the Triton dtype in which kernels multiply matrices of this dtype.

    Triton's interpreter cannot multiply bfloat16, so this is float32 there.
    """
    language = import_module("triton.language")
    return language.bfloat16 if dtype is torch.bfloat16 and not is_interpreted() else language.float32
