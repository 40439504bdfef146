"""Reads the settings of rotary embeddings from config.json: one for all layers, or one per attention type.

`read_ropes` returns the distinct settings and, for each layer, the index of its own. `_parameters` reads the field
names of different versions of transformers. `_scaling` reads the scaling methods, which `backend/layers/rope.py`
computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend.engine.errors import UnsupportedModel

DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Linear scaling: all frequencies are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling of low frequencies, with config.json's field names."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Phi-3's scaling: one factor per frequency for short contexts, and another one for long contexts."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN scaling (arXiv 2309.00071), with config.json's field names.

    `score_factor` is another factor of attention scores, which only DeepSeek's models apply.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int
    attention_factor: float
    truncate: bool
    score_factor: float


Scaling = LinearScaling | Llama3Scaling | LongRopeScaling | YarnScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Settings of one rotary embedding. `dim` is the number of rotated dimensions of a head."""

    dim: int
    theta: float
    scaling: Scaling | None


def read_ropes(
    raw: Mapping[str, Any], layer_types: Sequence[str], head_dim: int
) -> tuple[tuple[RopeConfig, ...], list[int | None]]:
    """Returns the distinct rotary embeddings and, for each layer, the index of its embedding, or None without one."""
    by_type = {kind: _read(parameters, raw, head_dim) for kind, parameters in _parameters(raw, layer_types).items()}
    ropes = tuple(dict.fromkeys(by_type.values()))
    rotated = raw.get("no_rope_layers") or [1] * len(layer_types)  # despite the name, 1 marks a layer with rope
    return ropes, [
        ropes.index(by_type[kind]) if is_rotated else None
        for kind, is_rotated in zip(layer_types, rotated, strict=True)
    ]


def longest_context(raw: Mapping[str, Any], ropes: Sequence[RopeConfig]) -> int:
    """Returns the maximum context length in tokens.

    With YaRN, config.json can contain the length before scaling, because Qwen instructs its users not to change it.
    With the other methods, config.json contains the scaled length.
    """
    stretched = (
        int(rope.scaling.factor * rope.scaling.original_max_position_embeddings)
        for rope in ropes
        if isinstance(rope.scaling, YarnScaling)
    )
    return max(int(raw["max_position_embeddings"]), *stretched, 0)


def _parameters(raw: Mapping[str, Any], layer_types: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    # transformers 5 writes rope_parameters. Earlier versions write rope_theta and an optional rope_scaling.
    given = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {})}
    kinds = dict.fromkeys(layer_types)
    if kinds.keys() <= given.keys():
        return {kind: given[kind] for kind in kinds}
    local = raw.get("rope_local_base_freq")  # Gemma 3, before transformers 5
    return {
        kind: {"rope_theta": local} if local is not None and kind == "sliding_attention" else given for kind in kinds
    }


def _read(parameters: Mapping[str, Any], raw: Mapping[str, Any], head_dim: int) -> RopeConfig:
    share = parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    theta = parameters.get("rope_theta") or raw.get("rope_theta") or DEFAULT_THETA
    rope = RopeConfig(int(head_dim * share), float(theta), _scaling(parameters, raw))
    if isinstance(rope.scaling, LongRopeScaling):
        for name, factors in (("short_factor", rope.scaling.short_factor), ("long_factor", rope.scaling.long_factor)):
            if len(factors) != rope.dim // 2:
                raise UnsupportedModel(f"rope {name} has {len(factors)} factors for {rope.dim // 2} frequencies")
    return rope


def _scaling(parameters: Mapping[str, Any], raw: Mapping[str, Any]) -> Scaling | None:
    original = parameters.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings")
    match kind := parameters.get("rope_type") or parameters.get("type") or "default":
        case "default":
            return None
        case "linear":
            return LinearScaling(parameters["factor"])
        case "llama3":
            return Llama3Scaling(
                factor=parameters["factor"],
                low_freq_factor=parameters["low_freq_factor"],
                high_freq_factor=parameters["high_freq_factor"],
                original_max_position_embeddings=parameters["original_max_position_embeddings"],
            )
        case "longrope" | "su":
            longest, original = raw["max_position_embeddings"], original or raw["max_position_embeddings"]
            stretch = parameters.get("factor") or longest / original
            default_factor = 1.0 if stretch <= 1.0 else math.sqrt(1.0 + math.log(stretch) / math.log(original))
            return LongRopeScaling(
                short_factor=tuple(parameters["short_factor"]),
                long_factor=tuple(parameters["long_factor"]),
                original_max_position_embeddings=original,
                attention_factor=parameters.get("attention_factor") or default_factor,
            )
        case "yarn":
            return _yarn(parameters, original or raw["max_position_embeddings"])
        case _:
            raise UnsupportedModel(
                f"rope_type {kind!r} is not supported, only 'default', 'linear', 'llama3', 'longrope' and 'yarn'"
            )


def _yarn(parameters: Mapping[str, Any], original: int) -> YarnScaling:
    factor, mscale, of_scores = parameters["factor"], parameters.get("mscale"), parameters.get("mscale_all_dim")

    def growth(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    default_factor = growth(mscale) / growth(of_scores) if mscale and of_scores else growth()
    return YarnScaling(
        factor=factor,
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        original_max_position_embeddings=original,
        attention_factor=parameters.get("attention_factor") or default_factor,
        truncate=parameters.get("truncate", True),
        score_factor=growth(of_scores) ** 2 if of_scores else 1.0,
    )
