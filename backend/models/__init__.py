"""Architectures by the name that a checkpoint's config.json gives them. One more is a row here and a file beside."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from backend.families import load_member

if TYPE_CHECKING:
    from backend.models.decoder import Decoder

ARCHITECTURES = {
    "LlamaForCausalLM": "backend.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "backend.models.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "backend.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "backend.models.qwen3:Qwen3ForCausalLM",
}


def architecture(name: str) -> type[Decoder]:
    return cast("type[Decoder]", load_member(ARCHITECTURES, name))
