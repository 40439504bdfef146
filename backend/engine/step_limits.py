"""How many sequences and tokens a step may have, by the device.

A CPU computes few tokens at once, so larger steps only delay the tokens of running requests. A GPU needs hundreds of
tokens before computing takes longer than reading the weights, and more memory holds the activations of more tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backend.engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of one step: sequences that run, and tokens that are computed."""

    max_num_seqs: int
    max_num_batched_tokens: int


CPU = StepLimits(64, 512)
GPU = StepLimits(256, 2048)
LARGE_GPU = StepLimits(256, 8192)
LARGE_GPU_BYTES = 64 << 30  # from this much memory on


def choose_step_limits(
    device: torch.device, max_num_seqs: int | None, max_num_batched_tokens: int | None
) -> StepLimits:
    """The given limits, and the device's in place of those that are None. They are made to fit those that are given.

    Raises `ConfigError` if both are given and do not fit.
    """
    default = _limits_of(device)
    seqs = max_num_seqs or min(default.max_num_seqs, max_num_batched_tokens or default.max_num_seqs)
    tokens = max_num_batched_tokens or max(default.max_num_batched_tokens, seqs)
    if tokens < seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({tokens}) must be at least max_num_seqs ({seqs}): "
            "every running request needs a token per step",
            param="max_num_batched_tokens",
        )
    return StepLimits(seqs, tokens)


def _limits_of(device: torch.device) -> StepLimits:
    if device.type != "cuda":
        return CPU
    return LARGE_GPU if torch.cuda.get_device_properties(device).total_memory >= LARGE_GPU_BYTES else GPU
