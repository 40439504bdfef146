"""Reads a checkpoint's config.json into a `ModelConfig`.

A setting that changes the computation and is not implemented raises `UnsupportedModel` with its name, because a model
that does not load is better than a model with wrong output. `_layer_types`, `_experts` and `read_ropes`
(rope_config.py) read settings that differ between layers. They apply the architecture's default for a field that
config.json omits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backend.engine.errors import ConfigError, UnsupportedModel
from backend.model_files import open_model_files
from backend.model_files.pooling import Classifier, decoder_config, read_pooling
from backend.model_files.quantized_checkpoints import check_method
from backend.models import ARCHITECTURES
from backend.models.deepseek_config import DEEPSEEK, GateConfig, LatentConfig, is_sparse, read_gate, read_latent
from backend.models.encoder_config import ENCODERS, EncoderConfig, read_encoder
from backend.models.rope_config import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
    longest_context,
    read_ropes,
)
from backend.models.vision_config import VisionConfig, read_vision

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # by the name in config.json
GPT_OSS = "GptOssForCausalLM"
NOTHING: Mapping[str, Any] = {}
SWIGLU_LIMIT = 7.0  # the constant in the gate of gpt-oss's experts (backend/ops)
# Architectures with tied embeddings by default: config.json omits fields with their default value.
TIED = frozenset({"Gemma2ForCausalLM", "Gemma3ForCausalLM", "SmolLM3ForCausalLM"})
# Architectures that normalise the weights of the chosen experts to sum to one.
NORMALISED = frozenset({GPT_OSS, "MixtralForCausalLM"})
# Period of the layers with full attention, if config.json has no layer_types.
GEMMA2_PATTERN, GPT_OSS_PATTERN, GEMMA3_PATTERN = 2, 2, 6


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Settings of the mixture of experts that replaces the MLP in a layer."""

    num_experts: int
    num_per_token: int
    intermediate_size: int
    normalise: bool  # whether the weights of the selected experts are normalised to sum to one
    gate: GateConfig | None = None  # None: the experts with the largest scores are selected
    shared_size: int = 0  # intermediate size of the experts that compute every token


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Settings of one layer, for those settings that differ between layers."""

    window: int | None  # attention window in tokens, including the token itself; None: full attention
    rope_index: int | None  # index into `ModelConfig.ropes`; None: no rotary embedding
    experts: ExpertsConfig | None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Settings of a model from its config.json, with defaults for the fields that it omits."""

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
    layers: tuple[LayerConfig, ...]
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    activation: str  # "silu" or "gelu_tanh"
    ropes: tuple[RopeConfig, ...]
    attention_scale: float
    attention_softcap: float | None
    attention_sinks: bool  # whether each head has a learnt attention sink
    logits_softcap: float | None
    embedding_scale: float
    residual_scale: float
    logits_scale: float
    dtype: str  # dtype of the checkpoint, from config.json
    eos_token_ids: frozenset[int]
    has_lm_head: bool = True
    latent: LatentConfig | None = None  # of multi-head latent attention; then `head_dim` is the size of a key head
    encoder: EncoderConfig | None = None  # None: a decoder
    vision: VisionConfig | None = None  # the image encoder; None: the model reads text alone
    classifier: Classifier | None = None  # the head that scores, if there is one; then there is no `lm_head`

    @classmethod
    def load(cls, model_dir: Path, overrides: Mapping[str, Any] = NOTHING) -> ModelConfig:
        """Reads a model's configuration. Raises `ConfigError` or `UnsupportedModel`.

        `overrides` replace fields of config.json.
        """
        files = open_model_files(model_dir)
        raw, generation = {**files.config(), **overrides}, files.generation_config()
        pooling = read_pooling(files, overrides)  # first: it checks the types of fields
        if (decoder := decoder_config(raw))["architectures"][0] in ARCHITECTURES:
            raw = decoder
        raw |= {k: v for k, v in generation.items() if k == "eos_token_id" and v is not None}
        try:
            encoder = read_encoder(files, raw)
            config = cls.parse(raw) if encoder is None else cls.of_encoder(raw, encoder)
            vision = read_vision(files)
        except KeyError as error:
            raise ConfigError(f"the configuration of {model_dir} lacks {error}", param="model_dir") from error
        if pooling.classifier and pooling.classifier.token_ids and config.logits_softcap is not None:
            raise UnsupportedModel("final_logit_softcapping is not supported together with a score from tokens' logits")
        return replace(config, has_lm_head=pooling.generates, classifier=pooling.classifier, vision=vision)

    @property
    def num_cached_layers(self) -> int:
        """The layers whose keys and values are cached. An encoder has none."""
        return 0 if self.encoder else self.num_layers

    @classmethod
    def of_encoder(cls, raw: Mapping[str, Any], encoder: EncoderConfig) -> ModelConfig:
        """Parses the content of an encoder's config.json. Raises KeyError for a missing field."""
        head_dim = raw["hidden_size"] // raw["num_attention_heads"]
        return cls(
            architecture=raw["architectures"][0],
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw["num_attention_heads"],
            head_dim=head_dim,
            rms_norm_eps=encoder.layer_norm_eps,
            max_position_embeddings=encoder.num_positions - encoder.first_position,
            layers=(),
            tie_word_embeddings=True,
            attention_bias=True,
            mlp_bias=True,
            activation="",
            ropes=(),
            attention_scale=head_dim**-0.5,
            attention_softcap=None,
            attention_sinks=False,
            logits_softcap=None,
            embedding_scale=1.0,
            residual_scale=1.0,
            logits_scale=1.0,
            dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
            eos_token_ids=frozenset(),
            encoder=encoder,
        )

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Parses the content of config.json. Raises `UnsupportedModel`, or KeyError for a missing field."""
        name = " and ".join(raw.get("architectures") or ["(none named)"])
        if name not in ARCHITECTURES:
            known = ", ".join(sorted([*ARCHITECTURES, *ENCODERS]))
            raise UnsupportedModel(f"architecture {name} is not one of {known}")
        _refuse_unsupported(raw)
        num_heads = raw["num_attention_heads"]
        num_kv_heads = raw.get("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            raise UnsupportedModel(f"{num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly")
        latent = read_latent(raw)
        head_dim = latent.head_dim if latent else raw.get("head_dim") or raw["hidden_size"] // num_heads
        layer_types = _layer_types(name, raw)
        ropes, rope_of_layer = read_ropes(raw, layer_types, latent.rotated_dim if latent else head_dim)
        eos = raw.get("eos_token_id")
        return cls(
            architecture=name,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=raw["rms_norm_eps"],
            max_position_embeddings=longest_context(raw, ropes),
            layers=tuple(
                LayerConfig(
                    window=raw["sliding_window"] if kind == "sliding_attention" else None,
                    rope_index=rope_of_layer[i],
                    experts=_experts(raw, i),
                )
                for i, kind in enumerate(layer_types)
            ),
            tie_word_embeddings=raw.get("tie_word_embeddings", name in TIED),
            attention_bias=raw.get("attention_bias", False),
            mlp_bias=raw.get("mlp_bias", False),
            activation=ACTIVATIONS[_activation(raw)],
            ropes=ropes,
            attention_scale=_attention_scale(raw, head_dim, ropes),
            attention_softcap=raw.get("attn_logit_softcapping"),
            attention_sinks=name == GPT_OSS,
            logits_softcap=raw.get("final_logit_softcapping"),
            embedding_scale=raw.get("embedding_multiplier", 1.0),
            residual_scale=raw.get("residual_multiplier", 1.0),
            logits_scale=1.0 / raw.get("logits_scaling", 1.0),
            dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
            eos_token_ids=frozenset([eos] if isinstance(eos, int) else eos or []),
            latent=latent,
        )


def _activation(raw: Mapping[str, Any]) -> str:
    return str(raw.get("hidden_activation") or raw.get("hidden_act") or "silu")


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if (activation := _activation(raw)) not in ACTIVATIONS:
        raise UnsupportedModel(f"hidden_act {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if (limit := raw.get("swiglu_limit", SWIGLU_LIMIT)) != SWIGLU_LIMIT:
        raise UnsupportedModel(
            f"swiglu_limit {limit} is not supported, only {SWIGLU_LIMIT}, the value of every published gpt-oss"
        )
    quantised = raw.get("quantization_config")
    if quantised and not (quantised.get("quant_method") == "mxfp4" and raw["architectures"] == [GPT_OSS]):
        check_method(quantised)
    if raw.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention is not supported")
    if (dtype := raw.get("dtype") or raw.get("torch_dtype") or "float32") not in DTYPES:
        raise UnsupportedModel(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if others := set(raw.get("layer_types") or ()) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(f"layer_types {sorted(others)} are not supported, only full and sliding attention")


def _layer_types(architecture: str, raw: Mapping[str, Any]) -> list[str]:
    """Returns the attention type of each layer. If config.json lists none, derives them by the architecture's rule."""
    num_layers = raw["num_hidden_layers"]
    if raw.get("sliding_window") is None or not raw.get("use_sliding_window", True):
        return ["full_attention"] * num_layers
    if raw.get("layer_types"):
        return list(raw["layer_types"])
    first, pattern = 0, 0  # index of the first sliding layer, and period of the full-attention layers after it
    match architecture:
        case "Gemma2ForCausalLM":
            pattern = GEMMA2_PATTERN
        case "Gemma3ForCausalLM":
            pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or GEMMA3_PATTERN
        case "GptOssForCausalLM":
            pattern = GPT_OSS_PATTERN
        case "Qwen2ForCausalLM" | "Qwen3ForCausalLM":
            first = raw.get("max_window_layers", num_layers)
    return [
        "full_attention" if i < first or (pattern and (i + 1) % pattern == 0) else "sliding_attention"
        for i in range(num_layers)
    ]


def _attention_scale(raw: Mapping[str, Any], head_dim: int, ropes: Sequence[RopeConfig]) -> float:
    if raw["architectures"][0] in DEEPSEEK:
        scaling = ropes[0].scaling
        return float(head_dim**-0.5 * (scaling.score_factor if isinstance(scaling, YarnScaling) else 1.0))
    if (scalar := raw.get("query_pre_attn_scalar")) is not None:
        return float(float(scalar) ** -0.5)
    return float(raw.get("attention_multiplier", head_dim**-0.5))


def _experts(raw: Mapping[str, Any], layer: int) -> ExpertsConfig | None:
    if raw["architectures"][0] in DEEPSEEK:
        return _deepseek_experts(raw) if is_sparse(raw, layer) else None
    num_experts = raw.get("num_experts") or raw.get("num_local_experts")
    if num_experts is None or layer in (raw.get("mlp_only_layers") or ()):
        return None
    if (layer + 1) % raw.get("decoder_sparse_step", 1):
        return None
    return ExpertsConfig(
        num_experts=num_experts,
        num_per_token=raw["num_experts_per_tok"],
        intermediate_size=raw.get("moe_intermediate_size") or raw["intermediate_size"],
        normalise=raw.get("norm_topk_prob", raw["architectures"][0] in NORMALISED),
    )


def _deepseek_experts(raw: Mapping[str, Any]) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=raw["n_routed_experts"],
        num_per_token=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        normalise=raw["norm_topk_prob"],
        gate=read_gate(raw),
        shared_size=raw["moe_intermediate_size"] * (raw.get("n_shared_experts") or 0),
    )


__all__ = [
    "ExpertsConfig", "LayerConfig", "LinearScaling", "Llama3Scaling", "LongRopeScaling", "ModelConfig", "RopeConfig",
    "YarnScaling",
]  # fmt: skip
