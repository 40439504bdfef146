"""Model architecture Qwen 2."""

from __future__ import annotations

from backend.models.config import ModelConfig
from backend.models.decoder import Decoder


class Qwen2ForCausalLM(Decoder):
    """Qwen 2: Llama with a bias on queries, keys and values. config.json has no field for the bias."""

    @staticmethod
    def has_qkv_bias(config: ModelConfig) -> bool:
        return True

    @staticmethod
    def has_output_bias(config: ModelConfig) -> bool:
        return False
