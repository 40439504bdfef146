"""The language model within a checkpoint that also has an image or sound encoder, under the names of a plain one.

config.json of such a checkpoint names a `...ForConditionalGeneration` architecture, and has the language model's fields
in `text_config`, or among its own. The tensors have a prefix. `image_encoder_tensors` selects those of the image
encoder, for the architectures in `IMAGE_MODELS`. The encoders of other architectures are not read, so that these models
answer prompts of text and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from backend.engine.errors import UnsupportedModel

# The architecture of the language model. For Mistral 3, `text_config.model_type` decides.
LANGUAGE_MODELS: Mapping[str, str | Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
    },
    "LlavaForConditionalGeneration": {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
    },
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
}
# The architectures whose image encoder the engine implements (backend/models/qwen_vision.py).
IMAGE_MODELS = frozenset({"Qwen2_5_VLForConditionalGeneration"})
# Fields beside `text_config` that also hold for the language model.
_SHARED_FIELDS = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")
# These models rotate by three positions of a token, which are equal for text. `VisionConfig` has how they are divided.
_MULTIMODAL_ROPES = ("mrope",)

_ENCODERS = re.compile(
    r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|audio_tower|embed_vision|embed_audio)\."
)
_IMAGE_ENCODER = re.compile(r"(model\.)?(?=visual\.)")
_INNER = re.compile(r"(embed_tokens|layers|norm)\.")
_RENAMED = (
    (re.compile(r"language_model\.(model|lm_head)\."), r"\1."),
    (re.compile(r"model\.language_model\."), "model."),
)

Value = TypeVar("Value")


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether config.json describes a multimodal model. Only its language model is loaded."""
    return any(name in LANGUAGE_MODELS for name in config.get("architectures") or ())


def reads_images(config: Mapping[str, Any]) -> bool:
    """Whether config.json describes a model whose image encoder the engine implements."""
    return any(name in IMAGE_MODELS for name in config.get("architectures") or ())


def language_config(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of config.json of the language model alone, or `config` if it describes just that.

    Raises `UnsupportedModel` for a kind of language model that is not known.
    """
    if not is_multimodal(config):
        return config
    (name,) = config["architectures"]
    given = config.get("text_config")
    shared = {field: config[field] for field in _SHARED_FIELDS if field in config}
    text: dict[str, Any] = {**shared, **given} if isinstance(given, Mapping) else dict(config)
    known = LANGUAGE_MODELS[name]
    if isinstance(known, Mapping):
        kind = str(text.get("model_type", ""))
        if kind not in known:
            raise UnsupportedModel(f"{name}: text_config.model_type {kind!r} is not one of {', '.join(known)}")
        known = known[kind]
    return {**text, "architectures": [known], **_plain_ropes(text)}


def _plain_ropes(text: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for field in ("rope_scaling", "rope_parameters"):
        given = text.get(field)
        if isinstance(given, Mapping) and "mrope_section" in given:
            kept = {name: value for name, value in given.items() if name not in ("mrope_section", "mrope_interleaved")}
            for kind in ("rope_type", "type"):
                if kept.get(kind) in _MULTIMODAL_ROPES:
                    kept[kind] = "default"
            plain[field] = kept
    return plain


def language_tensors(sources: Mapping[str, Value]) -> dict[str, Value]:
    """Returns what is stored under each name for the language model's tensors, under the names of a plain model."""
    return {_plain_name(name): value for name, value in sources.items() if not _ENCODERS.match(name)}


def image_encoder_tensors(sources: Mapping[str, Value]) -> dict[str, Value]:
    """Returns what is stored under each name for the image encoder's tensors, as `visual.*`."""
    return {name[found.end() :]: value for name, value in sources.items() if (found := _IMAGE_ENCODER.match(name))}


def with_outer_module(sources: Mapping[str, Value]) -> dict[str, Value]:
    """Returns what is stored under each name, with the names of a model that generates.

    sentence-transformers stores the decoder without its outer module, as `layers.0...` instead of `model.layers.0...`.
    """
    if any(name.startswith("model.") for name in sources):
        return dict(sources)
    return {f"model.{name}" if _INNER.match(name) else name: value for name, value in sources.items()}


def _plain_name(name: str) -> str:
    for pattern, replacement in _RENAMED:
        if found := pattern.match(name):
            return found.expand(replacement) + name[found.end() :]
    return name
