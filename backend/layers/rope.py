"""Rotary position embedding: the angles, as a table over positions. `Ops.rope` applies them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backend.models.config import LinearScaling, Llama3Scaling, RopeConfig


class RopeTable:
    def __init__(self, config: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> None:
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(config, head_dim)
        self._cos = angles.cos().to(device)  # [num_positions, head_dim / 2], float32
        self._sin = angles.sin().to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [T] -> cos, sin: [T, head_dim / 2]."""
        return self._cos[positions], self._sin[positions]


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    frequencies = 1.0 / config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match config.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Wavelengths that fit often into the original context stay, those that hardly fit are stretched by `factor`,
    and between `low_freq_factor` and `high_freq_factor` fits the two are blended."""
    num_fits = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (num_fits - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return blend * frequencies + (1.0 - blend) * frequencies / scaling.factor
