"""What each rank loads: together the whole checkpoint, and alone little more than its share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from backend.engine.config import EngineConfig
from backend.engine.errors import ConfigError
from backend.models.config import ModelConfig
from backend.parallel.limits import check_devices, devices_of_ranks
from backend.parallel.shards import Shards, check_divisible
from tests.backend.checkpoints import CHECKPOINTS, build_model, save


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_are_the_whole(name: str, size: int, checkpoint_dir: Callable[[str], Path]) -> None:
    """Each number of a divided tensor is on one rank, but those of key/value heads that ranks share."""
    directory = checkpoint_dir(name)
    model = ModelConfig.load(directory)
    check_divisible(model, size)
    num_numbers, num_loaded = 0, [0] * size
    for key, tensor in load_file(directory / "model.safetensors").items():
        parts = [Shards(model, rank, size).part(key, tensor) for rank in range(size)]
        assert all(isinstance(part, torch.Tensor) for part in parts)
        assert len({part.shape for part in parts}) == 1
        flat = torch.cat([part.flatten() for part in parts if isinstance(part, torch.Tensor)])
        assert set(tensor.flatten().tolist()) <= set(flat.tolist()), key
        num_numbers += tensor.numel()
        num_loaded = [n + math.prod(part.shape) for n, part in zip(num_loaded, parts, strict=True)]
    assert max(num_loaded) < 1.35 * num_numbers / size


def test_a_part_keeps_no_memory_of_the_whole() -> None:
    model = _llama()
    whole = torch.ones(64, 64)
    part = Shards(model, 1, 2).part("model.layers.0.self_attn.o_proj.weight", whole)
    assert isinstance(part, torch.Tensor)
    assert part.untyped_storage().nbytes() == whole.nbytes // 2


def test_biases_of_sums_are_added_once() -> None:
    bias = torch.ones(64)
    parts = [Shards(_llama(), rank, 2).part("model.layers.0.mlp.down_proj.bias", bias) for rank in range(2)]
    assert [part.tolist() for part in parts if isinstance(part, torch.Tensor)] == [[1.0] * 64, [0.0] * 64]


@pytest.mark.parametrize(
    ("changes", "size", "reason"),
    [
        ({}, 3, "4 attention heads are not a multiple of it"),
        ({"num_heads": 6, "num_kv_heads": 3}, 2, "3 key/value heads are neither a multiple nor a divisor of it"),
        ({"intermediate_size": 97}, 2, "the intermediate size of 97 is not a multiple of it"),
    ],
    ids=str,
)
def test_models_that_cannot_be_divided(changes: dict[str, object], size: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        check_divisible(replace(_llama(), **changes), size)  # type: ignore[arg-type]  # of each field its own type
    assert error.value.param == "tensor_parallel_size"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_loras": 1}, "max_loras"),
        ({"kv_host_bytes": 1 << 20}, "kv_host_bytes"),
        ({"device": "cuda"}, "this machine has no device 'cuda'|needs 64 GPUs"),
    ],
    ids=str,
)
def test_options_that_do_not_work(options: dict[str, object], named: str, tmp_path: Path) -> None:
    save(build_model("llama"), tmp_path)
    with pytest.raises(ConfigError, match=named):
        EngineConfig(model_dir=tmp_path, tensor_parallel_size=64, **options).resolve()  # type: ignore[arg-type]


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    check_devices(torch.device("cuda", 2), 2)
    assert devices_of_ranks(torch.device("cuda", 2), 2) == [torch.device("cuda", 2), torch.device("cuda", 3)]
    with pytest.raises(ConfigError, match="tensor_parallel_size 4 needs 4 GPUs from cuda:2 on, not 2"):
        check_devices(torch.device("cuda", 2), 4)


def test_the_size_of_the_cache_counts_all_ranks(checkpoint_dir: Callable[[str], Path]) -> None:
    """Two ranks share the key/value heads. Each of four has one, so a block takes twice the memory."""

    def num_blocks(size: int) -> int:
        config = EngineConfig(
            model_dir=checkpoint_dir("llama"), kv_cache_memory_bytes=1 << 20, tensor_parallel_size=size
        )
        return config.resolve().num_blocks

    assert num_blocks(2) == num_blocks(1)
    assert num_blocks(4) == num_blocks(1) // 2


def _llama() -> ModelConfig:
    return ModelConfig.parse(
        {
            "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 512,
        }
    )  # fmt: skip
