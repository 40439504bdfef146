from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.errors import WeightsError
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.models.weights import Checkpoint
from tests.backend.checkpoints import build_model, save


@pytest.fixture
def directory(checkpoint_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy that a test can damage."""
    return Path(shutil.copytree(checkpoint_dir("llama"), tmp_path / "llama"))


def load(directory: Path) -> Engine:
    return Engine.load(EngineConfig(model_dir=directory, num_blocks=8, num_threads=1))


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def first_tokens(directory: Path) -> list[int]:
    engine = load(directory)
    request = Request("r", [3, 4, 5], SamplingParams(max_tokens=8, temperature=0.0))
    engine.add(request)
    while engine.has_unfinished:
        engine.step()
    return request.token_ids


def test_sharded_weights_load_the_same_model(directory: Path, tmp_path: Path) -> None:
    sharded = save(build_model("llama"), tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert first_tokens(sharded) == first_tokens(directory)


def test_tied_embeddings_can_be_stored_twice(checkpoint_dir: Callable[[str], Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoint_dir("qwen2"), tmp_path / "qwen2"))
    expected = first_tokens(directory)
    rewrite(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert first_tokens(directory) == expected


def test_a_missing_tensor_is_named(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load(directory)


def test_an_unexpected_tensor_is_named(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}))
    with pytest.raises(WeightsError, match=r"does not use: model\.layers\.0\.self_attn\.q_norm\.weight"):
        load(directory)


def test_a_wrong_shape_is_named(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight has shape \(63,\), expected \(64,\)"):
        load(directory)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"not a tensor in sight")])
def test_files_that_cannot_be_read(directory: Path, damage: Callable[[Path], object]) -> None:
    damage(directory / "model.safetensors")
    with pytest.raises(WeightsError, match="cannot be read"):
        load(directory)


@pytest.mark.parametrize("index", ["{", "{}", json.dumps({"weight_map": {"a": "missing.safetensors"}})])
def test_an_invalid_shard_index(directory: Path, index: str) -> None:
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError):
        load(directory)


def test_tensors_are_converted_when_taken(directory: Path) -> None:
    with Checkpoint(directory, torch.bfloat16, torch.device("cpu")) as checkpoint:
        assert checkpoint.take("model.norm.weight", 64).dtype == torch.bfloat16
