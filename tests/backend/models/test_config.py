"""Reading config.json: supported settings, derived ones, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from backend.engine.errors import ConfigError, UnsupportedModel
from backend.layers.rope import inverse_frequencies
from backend.models.config import ModelConfig
from tests.backend.checkpoints import LLAMA3_ROPE, SHAPE


def raw(**changes: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6, **SHAPE, **changes}


SHORT_LISTS = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0], "long_factor": [1.0]}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not one of BertForSequenceClassification"),
        ({"architectures": None}, "none named"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "quip"}}, "quantization_config"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"dtype": "float64"}, "dtype 'float64'"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types .'linear_attention'."),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic'"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "LlamaForCausalLM and Other"),
        ({"rope_parameters": SHORT_LISTS}, "short_factor has 1 factors for 8"),
    ],
)
def test_unsupported_settings_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        ModelConfig.parse(raw(**changes))


GEMMA = {"architectures": ["Gemma3ForCausalLM"], "hidden_act": "gelu_pytorch_tanh", "num_hidden_layers": 7}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 64}, [64, 64]),
        ({"sliding_window": None}, [None, None]),
        ({"sliding_window": 64, "use_sliding_window": False}, [None, None]),
        ({"sliding_window": 64, "layer_types": ["full_attention", "full_attention"]}, [None, None]),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, [None, 64]),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 1}, [None, 64]),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 64}, [64, None]),
        ({"architectures": ["GptOssForCausalLM"], "sliding_window": 64}, [64, None]),
        ({**GEMMA, "sliding_window": 64}, [64, 64, 64, 64, 64, None, 64]),
        ({**GEMMA, "sliding_window": 64, "sliding_window_pattern": 2}, [64, None, 64, None, 64, None, 64]),
    ],
)
def test_layers_with_sliding_windows(changes: dict[str, Any], windows: list[int | None]) -> None:
    assert [layer.window for layer in ModelConfig.parse(raw(**changes)).layers] == windows


def test_sliding_layers_can_have_their_own_rotation() -> None:
    older = {**GEMMA, "sliding_window": 64, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    newer = {
        **GEMMA,
        "sliding_window": 64,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        },
    }
    for changes in (older, newer):
        config = ModelConfig.parse(raw(**changes))
        thetas = [config.ropes[layer.rope_index or 0].theta for layer in config.layers]
        assert thetas == [1e4] * 5 + [1e6, 1e4]


def test_layers_with_experts() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 4}
    config = ModelConfig.parse(raw(**experts, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert [layer.experts is not None for layer in config.layers] == [False, True, False, False]
    assert config.layers[1].experts is not None and not config.layers[1].experts.normalise


def write(directory: Path, **changes: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(raw(**changes)))
    return directory


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_config_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.load(tmp_path)
    assert caught.value.param == "model_dir"


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"hidden_size": ...}, "hidden_size"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0}}, "factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "short_factor"),
    ],
)
def test_missing_fields_are_named(tmp_path: Path, changes: dict[str, Any], missing: str) -> None:
    fields = {name: value for name, value in raw(**changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=f"lacks '{missing}'"):
        ModelConfig.load(tmp_path)


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
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 3.0, "original_max_position_embeddings": 170},
        {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    ],
)
def test_rotary_frequencies_equal_transformers(parameters: dict[str, Any]) -> None:
    """Exactly, because the position multiplies an error in the last bit."""
    config = AutoConfig.for_model("llama", **{**SHAPE, "head_dim": 128, "rope_parameters": parameters})
    (rope,) = ModelConfig.parse(raw(head_dim=128, rope_parameters=parameters)).ropes
    ours, factor = inverse_frequencies(rope, SHAPE["max_position_embeddings"])
    if parameters["rope_type"] == "default":
        expected, expected_factor = 1.0 / 5e5 ** (torch.arange(0, 128, 2) / 128), 1.0
    else:
        expected, expected_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    assert ours.tolist() == expected.tolist()
    assert factor == pytest.approx(expected_factor)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 512),
        (LLAMA3_ROPE, 512),
    ],
)
def test_the_maximum_context_length(rope: dict[str, Any], longest: int) -> None:
    assert ModelConfig.parse(raw(rope_scaling=rope)).max_position_embeddings == longest


@pytest.mark.parametrize("num_positions", [128, 512])
def test_phi3_selects_its_factors_by_the_maximum_context(num_positions: int) -> None:
    parameters = {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        "short_factor": [1.0 + i / 10 for i in range(16)], "long_factor": [2.1 + i for i in range(16)],
    }  # fmt: skip
    shape = {**SHAPE, "hidden_size": 256, "original_max_position_embeddings": 128, "rope_parameters": parameters}
    config = AutoConfig.for_model("phi3", **shape)
    (rope,) = ModelConfig.parse({**raw(), **shape}).ropes
    ours, factor = inverse_frequencies(rope, num_positions)
    expected, expected_factor = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=num_positions)
    assert ours.tolist() == expected.tolist()
    assert factor == pytest.approx(expected_factor)


def test_older_rope_fields_are_equivalent() -> None:
    old = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    assert (
        ModelConfig.parse(raw(rope_theta=10_000.0, rope_scaling=old)).ropes
        == ModelConfig.parse(raw(rope_parameters=LLAMA3_ROPE)).ropes
    )


def test_every_field_of_transformers_configs_is_read(checkpoint_dir: Callable[[str], Path]) -> None:
    config = ModelConfig.load(checkpoint_dir("mistral"))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 24)
    assert (config.hidden_size, config.vocab_size, config.dtype) == (64, 256, "float32")
