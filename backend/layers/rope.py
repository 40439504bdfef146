"""Rotary position embeddings: tables of cosines and sines by position, and the scaling methods for long contexts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from backend.models.config import LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig, YarnScaling
from backend.ops.base import Ops


class RopeTable:
    """Cosines and sines of all positions up to `num_positions`. `Ops.rope` applies them."""

    def __init__(self, config: RopeConfig, num_positions: int, device: torch.device, ops: Ops) -> None:
        self._ops = ops
        frequencies, scale = inverse_frequencies(config, num_positions)
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
        self._cos = (angles.cos() * scale).to(device)  # [num_positions, dim / 2], float32
        self._sin = (angles.sin() * scale).to(device)

    def __call__(self, positions: Tensor, sections: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines of positions [T], each [T, dim / 2].

        Positions [3, T] are times, rows and columns. `sections` has the number of frequencies that rotate by each.
        """
        if positions.dim() == 1:
            return self._ops.gather(self._cos, positions), self._ops.gather(self._sin, positions)
        axes = [table[positions].split([*sections], dim=-1) for table in (self._cos, self._sin)]
        cos, sin = (torch.cat([part[i % 3] for i, part in enumerate(parts)], dim=-1) for parts in axes)
        return cos, sin


def inverse_frequencies(config: RopeConfig, num_positions: int) -> tuple[Tensor, float]:
    """Returns the frequencies [dim / 2] of a rotary embedding, and the factor by which rotated vectors are multiplied.

    The frequencies equal those of training bit for bit, because the operations run in the same order as in
    transformers. At position 100,000, the last bit of a frequency rotates a pair by a hundredth of a radian.
    """
    dim = config.dim
    # Positions per radian of each pair.
    spans = config.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    frequencies = 1.0 / spans
    match config.scaling:
        case None:
            return frequencies, 1.0
        case LinearScaling(factor):
            return frequencies / factor, 1.0
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling), 1.0
        case LongRopeScaling() as scaling:
            return _long_rope(spans, scaling, num_positions)
        case YarnScaling() as scaling:
            return _yarn(spans, scaling, config), scaling.attention_factor


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Scales frequencies as Llama 3.1 does, by how many wavelengths of a frequency fit into the original context.

    A frequency with at least `high_freq_factor` wavelengths stays unchanged. A frequency with at most
    `low_freq_factor` wavelengths is divided by `factor`. Between the two, the results are blended linearly.
    """
    num_fits = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
    blend = (num_fits - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return blend * frequencies + (1.0 - blend) * frequencies / scaling.factor


def _long_rope(spans: Tensor, scaling: LongRopeScaling, num_positions: int) -> tuple[Tensor, float]:
    """Scales frequencies as Phi-3 does: divides each frequency by its factor from one of two lists.

    The maximum context length selects the list for all requests, because all cached keys must have the same rotation.
    vLLM does the same. transformers switches lists when a sequence outgrows the original context. It then reads cached
    keys that have the rotation of the other list.
    """
    long = num_positions > scaling.original_max_position_embeddings
    factors = torch.tensor(scaling.long_factor if long else scaling.short_factor, dtype=torch.float32)
    return 1.0 / (factors * spans), scaling.attention_factor


def _yarn(spans: Tensor, scaling: YarnScaling, config: RopeConfig) -> Tensor:
    """Scales frequencies by YaRN (arXiv 2309.00071, section 3.2), by their rotations within the original context.

    A frequency with more than `beta_fast` rotations stays unchanged. A frequency with fewer than `beta_slow` rotations
    is divided by `factor`. Between the two, the results are blended linearly.
    """

    def dimension(turns: float) -> float:
        turn_length = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return config.dim * math.log(turn_length) / (2 * math.log(config.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    ramp = (torch.arange(config.dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1.0 - ramp.clamp(0.0, 1.0)
    plain, stretched = 1.0 / spans, 1.0 / (scaling.factor * spans)
    return stretched * (1.0 - keep) + plain * keep
