"""The engine's configuration with every choice made. `EngineConfig.resolve` (config.py) makes it.

It is apart from config.py, because the parts of the engine are built from it and config.py imports their tables of
names: families import this module, and config.py imports the families.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from backend.models.config import ModelConfig

NONE = "none"  # speculation is off
NATIVE, TRITON = "native", "triton"  # members of two families: attention and ops


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """Every choice made. `dtype` and `device` are torch objects here; the other fields are as in `EngineConfig`."""

    model_dir: Path
    model: ModelConfig
    dtype: torch.dtype
    device: torch.device
    num_threads: int
    num_threads_reason: str  # for the log
    adapts_threads: bool  # the number of threads may change under load
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    enable_prefix_caching: bool
    kv_cache_dtype: str
    num_host_blocks: int
    kv_host_dir: Path | None
    attention: str
    ops: str
    starts_with_torch: bool  # torch computes until the native kernels are compiled
    enforce_eager: bool
    quantization: str
    speculation: str
    max_draft_tokens: int
    max_loras: int
    max_lora_rank: int
    tensor_parallel_size: int  # processes that compute the model together; sizes in `model` are those of the whole
    draft: ResolvedConfig | None = None  # of the draft model: differs in the model only
