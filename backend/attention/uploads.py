"""Copies to a device that the host does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of values on the host, on the device. For a CPU, the values themselves.

    From memory that is not pinned, torch would wait until the GPU has done everything that was launched before.
    """
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
