"""Which engines have equal layouts: those that serve the same weights and store blocks in the same form."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.kv_transfer.block_layout import BlockLayout, layout_of


def layout(model_dir: Path, **options: Any) -> BlockLayout:
    engine = Engine.load(EngineConfig(model_dir=model_dir, num_blocks=4, num_threads=1, **options))
    return layout_of(engine.config, engine.runner.kv)


@pytest.fixture
def model_dir(checkpoint_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint_dir("llama"), tmp_path / "model"))


def test_copies_of_a_model_are_equal_whatever_their_path_and_kernels(model_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model_dir, tmp_path / "other"))
    own = layout(model_dir)
    assert own.first_difference(layout(copy, ops="reference", attention="sdpa", max_model_len=32)) is None
    assert own.block_bytes == 2 * 2 * 16 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"dtype": "bfloat16"}, "dtype"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        ({"quantization": "int8"}, "quantization"),
        ({"block_size": 8}, "shape"),
    ],
)
def test_another_form_of_weights_or_blocks_differs(model_dir: Path, options: dict[str, Any], field: str) -> None:
    difference = layout(model_dir).first_difference(layout(model_dir, **options))
    assert difference and difference.startswith(f"{field} is ")


def test_other_weights_of_the_same_shape_differ(model_dir: Path) -> None:
    before = layout(model_dir)
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.k_proj.weight"] *= 1.01
    save_file(tensors, path, metadata={"format": "pt"})
    difference = before.first_difference(layout(model_dir))
    assert difference and difference.startswith("model is ")


def test_another_setting_of_the_model_differs(model_dir: Path) -> None:
    before = layout(model_dir)
    path = model_dir / "config.json"
    path.write_text(path.read_text().replace('"factor": 8.0', '"factor": 4.0'))
    assert before.model != layout(model_dir).model


def test_the_context_selects_the_factors_of_long_rope(checkpoint_dir: Callable[[str], Path], tmp_path: Path) -> None:
    model_dir = Path(shutil.copytree(checkpoint_dir("phi3-longrope"), tmp_path / "model"))
    path = model_dir / "config.json"
    path.write_text(
        path.read_text().replace('"original_max_position_embeddings": 512', '"original_max_position_embeddings": 64')
    )
    short, long, longer = (layout(model_dir, max_model_len=length).model for length in (64, 65, 128))
    assert short != long == longer
