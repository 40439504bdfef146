"""The language model of multimodal checkpoints gives the tokens of transformers' whole model for a prompt of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.errors import UnsupportedModel
from backend.model_files import open_model_files
from backend.models.config import ModelConfig
from tests.backend.checkpoints import SHAPE
from tests.backend.models.test_parity import NUM_TOKENS, PROMPTS, greedy

VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {
            **SHAPE, "model_type": "gemma3_text", "head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 20,
        },
        "vision_config": {**VISION, "model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "text_config": {**SHAPE, "model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False},
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16}, "tie_word_embeddings": False,
    },
    "qwen2_5_vl": {
        "text_config": {**SHAPE, "rope_parameters": MROPE, "tie_word_embeddings": False},
        "vision_config": QWEN_VISION, "tie_word_embeddings": False,
    },
    "qwen3_vl": {
        "text_config": {
            **SHAPE, "head_dim": 16, "tie_word_embeddings": True,
            "rope_parameters": MROPE | {"mrope_interleaved": True},
        },
        "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]}, "tie_word_embeddings": True,
    },
}  # fmt: skip


def build(kind: str, directory: Path) -> PreTrainedModel:
    torch.manual_seed(11)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **MODELS[kind]))
    model = model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(("lm_head.weight", "embed_tokens.weight")):
                parameter.normal_(std=0.1 if kind == "gemma3" else 0.5)
            else:
                parameter.normal_(std=0.3)
    model.float().save_pretrained(directory)
    return model.double()


@pytest.mark.parametrize("kind", MODELS)
def test_greedy_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    model = build(kind, tmp_path)
    engine = Engine.load(EngineConfig(model_dir=tmp_path, num_blocks=64, num_threads=1))
    outputs = greedy(engine, PROMPTS)
    for name, prompt in PROMPTS.items():
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(NUM_TOKENS):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert [token.token_id for token in outputs[name]] == tokens[len(prompt) :]


def test_names_of_older_checkpoints(tmp_path: Path) -> None:
    """transformers before 4.52 wrote `language_model.model.` where it writes `model.language_model.` now."""
    build("gemma3", tmp_path)
    path = tmp_path / "model.safetensors"
    with open_model_files(tmp_path).tensors() as readers:
        expected = readers.keys()
    old = {
        name.replace("model.language_model.", "language_model.model.").replace("model.vision", "vision"): tensor
        for name, tensor in load_file(path).items()
    }
    assert any(name.startswith("language_model.model.") for name in old)
    save_file(old, path)
    with open_model_files(tmp_path).tensors() as readers:
        assert readers.keys() == expected
    Engine.load(EngineConfig(model_dir=tmp_path, num_blocks=16, num_threads=1))


def test_an_unknown_language_model_is_named(tmp_path: Path) -> None:
    build("mistral3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = "mamba"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"text_config\.model_type 'mamba'"):
        ModelConfig.load(tmp_path)
