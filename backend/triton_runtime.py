"""Detects whether Triton kernels can run: on a GPU if Triton is installed, and in tests by Triton's interpreter."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

EARLY_START_CAPABILITY = 9  # major: from Hopper on, a kernel can start while the previous one still runs

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


@cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels on this device can start while the previous one still runs, and then wait for its results."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= EARLY_START_CAPABILITY


def early_start(waits: bool) -> dict[str, bool]:
    """The launch options of a kernel with the constant WAITS. Triton's interpreter does not know the option."""
    return {"WAITS": True, "launch_pdl": True} if waits else {"WAITS": False}


def exact_rounding() -> dict[str, bool]:
    """The launch options of a kernel in which every operation rounds, as in torch. The interpreter always does so."""
    return {} if is_interpreted() else {"enable_fp_fusion": False}
