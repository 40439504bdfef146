"""DeepSeek V2 and V3: their settings and published checkpoints. Parity with transformers is in test_parity.py."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.engine.batch import make_batch
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.errors import UnsupportedModel, WeightsError
from backend.engine.paged_model import PagedModel
from backend.engine.plan import ScheduledRequest
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.model_files import open_model_files
from backend.models.config import ModelConfig
from tests.backend.checkpoints import build_model, save

# Fields of the published config.json files.
COMMON: dict[str, Any] = {
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512, "attention_bias": False,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000, "moe_layer_freq": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
V2_LITE = COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 102_400, "hidden_size": 2048, "intermediate_size": 10_944,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "scoring_func": "softmax",
    "norm_topk_prob": False, "routed_scaling_factor": 1.0, "max_position_embeddings": 163_840,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
V3 = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "max_position_embeddings": 163_840,
    "num_nextn_predict_layers": 1, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip
KIMI_K2 = V3 | {"num_attention_heads": 64, "num_key_value_heads": 64, "n_group": 1, "topk_group": 1}


@pytest.mark.parametrize(("raw", "weight"), [(V2_LITE, 0.707), (V3, 1.0)], ids=["V2-Lite", "V3"])
def test_published_settings(raw: dict[str, Any], weight: float) -> None:
    config = ModelConfig.parse(raw)
    first = raw["first_k_dense_replace"]
    assert [layer.experts is None for layer in config.layers] == [i < first for i in range(config.num_layers)]
    assert (config.head_dim, config.num_kv_heads) == (192, raw["num_attention_heads"])
    assert config.ropes[0].dim == 64
    assert config.attention_scale == pytest.approx(192**-0.5 * (0.1 * weight * math.log(40) + 1) ** 2)
    assert config.max_position_embeddings == 163_840


@pytest.mark.parametrize(("raw", "num_bytes"), [(V2_LITE, 331_776), (KIMI_K2, 2_998_272), (V3, 5_996_544)])
def test_the_memory_of_a_token_is_that_of_the_documentation(raw: dict[str, Any], num_bytes: int) -> None:
    """In bfloat16 (docs/explanation/engine.md)."""
    config = ModelConfig.parse(raw)
    assert config.num_cached_layers * 2 * config.num_kv_heads * config.head_dim * 2 == num_bytes
    text = (Path(__file__).parents[3] / "docs/explanation/engine.md").read_text()
    assert f"{num_bytes:,} bytes" in text


@pytest.mark.parametrize(
    ("raw", "changes", "named"),
    [
        (
            V2_LITE,
            {"topk_method": "noaux_tc"},
            "topk_method 'noaux_tc' .*, only greedy, group_limited_greedy",
        ),
        (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob"),
        (V2_LITE, {"attention_bias": True}, "attention_bias is not supported without q_lora_rank"),
        (V2_LITE, {"mlp_bias": True}, "mlp_bias"),
        (V2_LITE, {"v_head_dim": 256}, "v_head_dim 256"),
        (V2_LITE, {"num_key_value_heads": 4}, "num_key_value_heads 4"),
        (V3, {"topk_method": "greedy"}, "topk_method 'greedy'"),
        (V3, {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        (V3, {"n_group": 7}, "n_group 7 and topk_group 4 do not divide 256 experts"),
        (V3, {"topk_group": 9}, "topk_group 9"),
        (V3, {"n_group": 256}, "n_group 256 leaves groups of 1 experts"),
        (V3, {"architectures": ["DeepseekV32ForCausalLM"]}, "DeepseekV32ForCausalLM is not one of"),
    ],
)
def test_unsupported_settings_are_named(raw: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        ModelConfig.parse(raw | changes)


@pytest.mark.parametrize("missing", ["kv_lora_rank", "q_lora_rank", "n_group", "routed_scaling_factor"])
def test_missing_fields_are_named(missing: str) -> None:
    with pytest.raises(KeyError, match=missing):
        ModelConfig.parse({name: value for name, value in V3.items() if name != missing})


def test_layers_with_experts() -> None:
    config = ModelConfig.parse(V3 | {"num_hidden_layers": 8, "moe_layer_freq": 2})
    assert [i for i, layer in enumerate(config.layers) if layer.experts] == [4, 6]
    assert not any(layer.experts for layer in ModelConfig.parse(V3 | {"n_routed_experts": None}).layers)


def first_tokens(directory: Path) -> list[int]:
    engine = Engine.load(EngineConfig(model_dir=directory, num_blocks=8, num_threads=1))
    request = Request("r", [3, 4, 5], SamplingParams(max_tokens=8, temperature=0.0))
    engine.add(request)
    while engine.has_unfinished:
        engine.step()
    return request.token_ids


PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(60)]


def first_logprobs(directory: Path, prompt: list[int], **options: Any) -> torch.Tensor:
    """The log-probabilities of the token after a prompt, of the whole vocabulary."""
    config = EngineConfig(model_dir=directory, num_blocks=16, num_threads=1, device="cpu", **options).resolve()
    model, request = PagedModel(config), Request("r", prompt, SamplingParams(max_tokens=1))
    request.block_table = [*range(-(-len(prompt) // config.block_size))]
    with torch.inference_mode():
        batch = make_batch([ScheduledRequest(request, 0, len(prompt))], config.block_size, config.device)
        return model.logits(model.forward(batch))[0].log_softmax(-1)


def divergence_of(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    """The Kullback-Leibler divergence of two distributions."""
    return (exact.exp() * (exact - rounded)).sum().item()


@pytest.mark.parametrize(
    ("options", "divergence"),
    [
        ({"dtype": "bfloat16"}, 0.1),
        ({"quantization": "int8"}, 0.3),
        ({"kv_cache_dtype": "int8"}, 0.1),
        ({"kv_cache_dtype": "fp8_e4m3"}, 1.0),
    ],
    ids=str,
)
def test_quantized_weights_and_caches_are_close(tmp_path: Path, options: dict[str, Any], divergence: float) -> None:
    """Without experts, because a rounding error can select another expert of a random model.

    The model's logits are large, so rounding changes them much. Still, another prompt's distribution is far away.
    """
    directory = save(build_model("deepseek-v3", first_k_dense_replace=3), tmp_path / "deepseek")
    exact, rounded = first_logprobs(directory, PROMPT), first_logprobs(directory, PROMPT, **options)
    other = first_logprobs(directory, PROMPT[:-1])
    assert 0 < divergence_of(exact, rounded) < divergence
    assert divergence_of(exact, other) > 3


def test_tensors_that_published_checkpoints_have_in_addition(
    checkpoint_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """V3's layer that predicts a second token, and the frequencies that Kimi K2 stores."""
    directory = Path(shutil.copytree(checkpoint_dir("deepseek-v3"), tmp_path / "deepseek"))
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)
    tensors["model.layers.3.self_attn.q_a_proj.weight"] = torch.ones(40, 64)
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, directory / "model.safetensors")
    assert first_tokens(directory) == first_tokens(checkpoint_dir("deepseek-v3"))
    folders = (directory, checkpoint_dir("deepseek-v3"))
    memory = [open_model_files(each).weights_bytes(torch.bfloat16) for each in folders]
    assert memory[0] - memory[1] == 2 * 4  # of the frequencies
    for name in ("model.layers.1.mlp.gate.bias", "model.layers.4.input_layernorm.weight"):
        save_file(tensors | {name: torch.ones(8)}, directory / "model.safetensors")
        with pytest.raises(WeightsError, match=f"does not use: {name}"):
            first_tokens(directory)
