"""A checkpoint's config.json, read into what the models here act upon.

Whatever would change the arithmetic and is not implemented is refused by name: a model that answers nonsense is
worse than one that does not load.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.engine.errors import ConfigError, UnsupportedModel
from backend.models import ARCHITECTURES

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the low frequencies; the names are the checkpoint's."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    scaling: Llama3Scaling | LinearScaling | None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    sliding_window: int | None  # an attention span that no model here implements: the context must stay within it
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    dtype: str  # of the checkpoint, as it says itself
    eos_token_ids: frozenset[int]

    @classmethod
    def load(cls, model_dir: Path) -> ModelConfig:
        """Raises `ConfigError` if there is no readable config.json, `UnsupportedModel` if it asks for too much."""
        raw = _read_json(model_dir / "config.json")
        generation_path = model_dir / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.exists() else {}
        return cls.parse({**raw, **{k: v for k, v in generation.items() if k == "eos_token_id" and v is not None}})

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> ModelConfig:
        (name,) = raw.get("architectures") or ["(none named)"]
        if name not in ARCHITECTURES:
            raise UnsupportedModel(f"architecture {name} is not one of {', '.join(sorted(ARCHITECTURES))}")
        _refuse_unsupported(raw)
        num_heads = raw["num_attention_heads"]
        num_kv_heads = raw.get("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            raise UnsupportedModel(f"{num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly")
        eos = raw.get("eos_token_id")
        return cls(
            architecture=name,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // num_heads,
            rms_norm_eps=raw["rms_norm_eps"],
            max_position_embeddings=raw["max_position_embeddings"],
            sliding_window=_sliding_window(raw),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            attention_bias=raw.get("attention_bias", False),
            mlp_bias=raw.get("mlp_bias", False),
            rope=_rope(raw),
            dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
            eos_token_ids=frozenset([eos] if isinstance(eos, int) else eos or []),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="model_dir") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold an object", param="model_dir")
    return value


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModel(f"hidden_act {activation!r} is not supported, only 'silu'")
    if raw.get("quantization_config"):
        raise UnsupportedModel("quantization_config: checkpoints that are already quantised are not supported")
    if (partial := raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported, only 1.0")
    if (dtype := raw.get("dtype") or raw.get("torch_dtype") or "float32") not in DTYPES:
        raise UnsupportedModel(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if others := set(raw.get("layer_types") or ()) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(f"layer_types {sorted(others)} are not supported, only full attention")


def _sliding_window(raw: Mapping[str, Any]) -> int | None:
    window: int | None = raw.get("sliding_window")
    slides = "sliding_attention" in (raw.get("layer_types") or ["sliding_attention"])
    return window if slides and raw.get("use_sliding_window", True) else None


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes rope_parameters; before it, rope_theta stood alone beside an optional rope_scaling.
    parameters = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {})}
    theta = parameters.get("rope_theta") or raw.get("rope_theta") or 10_000.0
    match kind := parameters.get("rope_type") or parameters.get("type") or "default":
        case "default":
            return RopeConfig(theta, None)
        case "linear":
            return RopeConfig(theta, LinearScaling(parameters["factor"]))
        case "llama3":
            scaling = Llama3Scaling(
                factor=parameters["factor"],
                low_freq_factor=parameters["low_freq_factor"],
                high_freq_factor=parameters["high_freq_factor"],
                original_max_position_embeddings=parameters["original_max_position_embeddings"],
            )
            return RopeConfig(theta, scaling)
        case _:
            raise UnsupportedModel(f"rope_type {kind!r} is not supported, only 'default', 'linear' and 'llama3'")
