"""What tensor parallelism needs of a machine, and which options do not work with it yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from backend.engine.errors import ConfigError
from backend.engine.threads import ThreadChoice
from backend.parallel.shards import PARAM

if TYPE_CHECKING:
    from backend.engine.config import EngineConfig


def refuse_undivided(config: EngineConfig) -> None:
    """Raises `ConfigError` for an option that needs the whole model or the whole KV cache in one process."""
    refused = {
        "max_loras": config.max_loras > 0,
        "kv_host_bytes": config.kv_host_bytes is not None,
    }
    for what, is_wanted in refused.items():
        if is_wanted:
            raise ConfigError(f"{PARAM} {config.tensor_parallel_size} does not work with {what}", param=PARAM)


def device_of_rank(device: torch.device, rank: int) -> torch.device:
    """Ranks use neighbouring GPUs, from the configured one on. On a CPU, all use the same device."""
    return torch.device("cuda", device.index + rank) if device.type == "cuda" else device


def check_devices(device: torch.device, size: int) -> None:
    """Raises `ConfigError` if there are fewer GPUs than ranks. All ranks can use the same CPU."""
    if not torch.distributed.is_available():
        raise ConfigError(f"{PARAM} {size} needs a build of torch with torch.distributed", param=PARAM)
    if device.type != "cuda":
        return
    available = torch.cuda.device_count() - device.index
    if size > available:
        raise ConfigError(f"{PARAM} {size} needs {size} GPUs from {device} on, not {available}", param=PARAM)


def threads_of_rank(cores: int, size: int) -> ThreadChoice:
    """The ranks share the cores evenly. They wait for each other after every layer, so more threads help none."""
    count = max(1, cores // size)
    return ThreadChoice(count, f"{size} ranks share {cores} cores")


def devices_of_ranks(device: torch.device, size: int) -> list[torch.device]:
    """The devices whose memory the ranks use."""
    return [device_of_rank(device, rank) for rank in range(size)] if device.type == "cuda" else [device]
