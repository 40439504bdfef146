"""Whether torch can compute until the native kernels are compiled, and what changes then.

The kernels take a minute or two of a compiler's time, once. Until then torch computes the same model several times
slower. kernel_swap.py then loads the weights a second time, in the kernels' layouts, and replaces torch between two
steps. The KV cache has the same form for both. So all of these models can change over, except those that
`reason_to_wait` names.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from backend.engine.resolved_config import NATIVE, ResolvedConfig
from backend.model_files import open_model_files
from backend.native import compiler
from backend.quantization import bits_per_weight


def reason_to_wait(config: ResolvedConfig, cache_bytes: int, free_bytes: int | None) -> str | None:
    """Why an engine with this configuration has to wait for the kernels; None if torch can compute meanwhile.

    cache_bytes: of the KV cache. free_bytes: memory that is free before the weights are loaded; None if it is unknown.
    """
    if config.draft is not None:
        return "a draft model saves no time with torch"
    if not compiler.can_write_cache():
        return "the cache folder for compiled kernels cannot be written"
    files, bits = open_model_files(config.model_dir), bits_per_weight(config.quantization)
    weights = files.weights_bytes(config.dtype, bits)
    stays_quantized = bits is None and config.dtype is torch.bfloat16
    if files.weights_bytes(config.dtype, bits, stays_quantized=stays_quantized) < weights:
        return "only they multiply the weights in the quantized form of the model's file"
    needed = 2 * weights + cache_bytes
    if free_bytes is not None and needed > free_bytes:
        needed_mib, free_mib = needed >> 20, free_bytes >> 20
        return f"a second copy of the weights does not fit into memory ({needed_mib} MiB of {free_mib} MiB)"
    return None


def with_kernels(config: ResolvedConfig) -> ResolvedConfig:
    """The configuration after torch has been replaced."""
    return replace(config, ops=NATIVE, attention=NATIVE, starts_with_torch=False)
