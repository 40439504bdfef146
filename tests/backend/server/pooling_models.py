"""Tiny random models that embed or score, with the files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.backend.server.conftest import MAX_MODEL_LEN, VOCAB_SIZE, save_tokenizer

SIZE = 64  # of a vector


def save_model(directory: Path, module: str, settings: dict[str, Any]) -> Path:
    """A tiny random Qwen 3 with one module of sentence-transformers after it."""
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=SIZE, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=MAX_MODEL_LEN, bos_token_id=0, eos_token_id=1,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    (directory / f"1_{module}").mkdir()
    (directory / f"1_{module}" / "config.json").write_text(json.dumps(settings))
    modules = [{"path": "", "type": "st.Transformer"}, {"path": f"1_{module}", "type": f"st.{module}"}]
    if module == "Pooling":
        modules.append({"path": "2_Normalize", "type": "st.Normalize"})
    (directory / "modules.json").write_text(json.dumps(modules))
    return directory
