from __future__ import annotations

from backend.models.config import ModelConfig
from backend.models.decoder import Decoder


class Qwen2ForCausalLM(Decoder):
    """A bias on queries, keys and values, always; config.json does not mention it."""

    @staticmethod
    def has_qkv_bias(config: ModelConfig) -> bool:
        return True

    @staticmethod
    def has_output_bias(config: ModelConfig) -> bool:
        return False
