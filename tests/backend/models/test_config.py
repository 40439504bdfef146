from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from backend.engine.config import EngineConfig
from backend.engine.errors import ConfigError, UnsupportedModel
from backend.layers.rope import inverse_frequencies
from backend.models.config import ModelConfig
from tests.backend.checkpoints import LLAMA3_ROPE, SHAPE


def raw(**changes: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6, **SHAPE, **changes}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not one of LlamaForCausalLM"),
        ({"architectures": None}, "none named"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"dtype": "float64"}, "dtype 'float64'"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types .'linear_attention'."),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        ModelConfig.parse(raw(**changes))


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 64}, 64),
        ({"sliding_window": None}, None),
        ({"sliding_window": 64, "use_sliding_window": False}, None),
        ({"sliding_window": 64, "layer_types": ["full_attention", "full_attention"]}, None),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, 64),
    ],
)
def test_a_sliding_window_counts_only_where_it_is_active(changes: dict[str, Any], window: int | None) -> None:
    assert ModelConfig.parse(raw(**changes)).sliding_window == window


def write(directory: Path, **changes: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(raw(**changes)))
    return directory


def test_a_context_beyond_the_sliding_window_is_refused_and_one_within_it_is_not(tmp_path: Path) -> None:
    write(tmp_path, sliding_window=64)
    with pytest.raises(ConfigError, match="sliding_window of 64") as caught:
        EngineConfig(model_dir=tmp_path).resolve()
    assert caught.value.param == "max_model_len"
    assert EngineConfig(model_dir=tmp_path, max_model_len=64).resolve().max_model_len == 64


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_config_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.load(tmp_path)
    assert caught.value.param == "model_dir"


def test_end_of_sequence_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=2)
    assert ModelConfig.load(tmp_path).eos_token_ids == {2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert ModelConfig.load(tmp_path).eos_token_ids == {2, 7}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        LLAMA3_ROPE,
        {**LLAMA3_ROPE, "factor": 32.0, "original_max_position_embeddings": 8192, "rope_theta": 5e5},
    ],
)
def test_rotary_frequencies_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    config = AutoConfig.for_model("llama", **{**SHAPE, "head_dim": 128, "rope_parameters": parameters})
    ours = inverse_frequencies(ModelConfig.parse(raw(rope_parameters=parameters)).rope, 128)
    if parameters["rope_type"] == "default":
        expected = 1.0 / 5e5 ** (torch.arange(0, 128, 2) / 128)
    else:
        expected, _ = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(ours, expected)


def test_the_older_form_of_rope_settings_means_the_same() -> None:
    old = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    assert (
        ModelConfig.parse(raw(rope_theta=10_000.0, rope_scaling=old)).rope
        == ModelConfig.parse(raw(rope_parameters=LLAMA3_ROPE)).rope
    )


def test_a_checkpoint_of_transformers_is_read_whole(checkpoint_dir: Callable[[str], Path]) -> None:
    config = ModelConfig.load(checkpoint_dir("mistral"))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 24)
    assert (config.hidden_size, config.vocab_size, config.dtype) == (64, 256, "float32")
