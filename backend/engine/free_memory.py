"""How much memory is free: a GPU's according to CUDA, the machine's according to Linux and the container's limit."""

from __future__ import annotations

import re
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # cgroup version 2; inside a container, this is the container's own group


def free_memory_bytes(device: torch.device) -> int | None:
    """The free memory of the device. None if the machine does not report it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = [memory for memory in (_available(MEMINFO), _left_in_cgroup(CGROUP)) if memory is not None]
    return min(found, default=None)


def _available(meminfo: Path) -> int | None:
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


def _left_in_cgroup(cgroup: Path) -> int | None:
    try:
        limit, current = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return max(0, int(limit) - int(current)) if limit.isdigit() else None
