"""Model architectures by their name in config.json. To add one, add a row to `ARCHITECTURES` and a file.

This package imports `layers`, `model_files`, `ops` and `quantization`. Begin at `decoder.py`, which all architectures
share. The other files define how an architecture differs from it. Encoders are in `encoder.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from backend.families import load_member

if TYPE_CHECKING:
    from backend.models.decoder import Decoder

ARCHITECTURES = {
    "DeepseekV2ForCausalLM": "backend.models.deepseek:DeepseekForCausalLM",
    "DeepseekV3ForCausalLM": "backend.models.deepseek:DeepseekForCausalLM",
    "Gemma2ForCausalLM": "backend.models.gemma:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "backend.models.gemma:Gemma3ForCausalLM",
    "Glm4ForCausalLM": "backend.models.glm:Glm4ForCausalLM",
    "GlmForCausalLM": "backend.models.glm:GlmForCausalLM",
    "GptOssForCausalLM": "backend.models.gpt_oss:GptOssForCausalLM",
    "GraniteForCausalLM": "backend.models.granite:GraniteForCausalLM",
    "LlamaForCausalLM": "backend.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "backend.models.llama:LlamaForCausalLM",
    "MixtralForCausalLM": "backend.models.mixtral:MixtralForCausalLM",
    "Olmo2ForCausalLM": "backend.models.olmo2:Olmo2ForCausalLM",
    "Phi3ForCausalLM": "backend.models.phi3:Phi3ForCausalLM",
    "Qwen2ForCausalLM": "backend.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "backend.models.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "backend.models.qwen3:Qwen3ForCausalLM",
    "SmolLM3ForCausalLM": "backend.models.llama:LlamaForCausalLM",
}


def architecture(name: str) -> type[Decoder]:
    """Imports and returns the class of the architecture with this name."""
    return cast("type[Decoder]", load_member(ARCHITECTURES, name))
