"""gpt-oss as `ollama pull` stores it equals the model that OpenAI published, in the layouts of all releases."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.errors import WeightsError
from backend.model_files import open_model_files
from backend.model_files.quantized_tensor import dequantized
from backend.models.config import ModelConfig
from tests.backend.checkpoints import save_gpt_oss_in_mxfp4
from tests.backend.gguf_writer import experts_in_mxfp4, write_gguf
from tests.backend.model_files.test_gguf_models import next_logits
from tests.backend.ollama_writer import LAYOUTS, write_ollama


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bfloat16 except for its experts, like OpenAI's, so that the conversion does not round."""
    directory = tmp_path_factory.mktemp("gpt-oss")
    save_gpt_oss_in_mxfp4(directory / "plain", directory / "published")
    for each in ("plain", "published"):
        path = directory / each / "model.safetensors"
        tensors = load_file(path)
        rounded = {name: t.bfloat16().float() if t.is_floating_point() else t for name, t in tensors.items()}
        save_file(rounded, path)
    return directory / "published"


@pytest.fixture(scope="module", params=LAYOUTS)
def ollama_file(request: pytest.FixtureRequest, published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ollama's file, named as a blob by its digest."""
    return write_ollama(published, tmp_path_factory.mktemp("blobs") / "sha256-0123abcd", LAYOUTS[request.param])


def test_every_tensor_equals_llama_cpps_conversion(ollama_file: Path, published: Path, tmp_path: Path) -> None:
    converted = write_gguf(published.parent / "plain", tmp_path / "m.gguf", experts_in_mxfp4(others=Kind.F32))
    with open_model_files(ollama_file).tensors() as ours, open_model_files(converted).tensors() as theirs:
        assert ours.keys() == theirs.keys()
        for name in theirs:
            found, expected = ours[name](), theirs[name]()
            assert type(found) is type(expected), name
            # The other writer turns negative zeros into positive ones, which are equal.
            assert torch.equal(dequantized(found), dequantized(expected)), name


def test_logits_equal_the_published_checkpoint_to_the_bit(ollama_file: Path, published: Path) -> None:
    assert torch.equal(next_logits(ollama_file), next_logits(published))


def test_the_configuration_equals_the_published_checkpoint(ollama_file: Path, published: Path) -> None:
    expected = ModelConfig.load(published)
    in_float32 = float(np.float32(expected.rms_norm_eps))
    # The file's dtype is that of its matrices; the directory stores them in float32.
    wanted = dataclasses.replace(expected, rms_norm_eps=in_float32, eos_token_ids=frozenset(), dtype="bfloat16")
    assert ModelConfig.load(ollama_file) == wanted


def test_a_template_next_to_a_file_without_one_is_read(ollama_file: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(ollama_file, tmp_path))
    assert open_model_files(path).chat_templates() == {}
    (tmp_path / "chat_template.jinja").write_text("{{ 'é' }}", encoding="utf-8")
    assert open_model_files(path).chat_templates() == {"default": "{{ 'é' }}"}


@pytest.mark.parametrize(
    ("there", "instead", "named"),
    [
        (
            b"gptoss.attention.head_count_kv",
            b"gptoss.attention.head_count_k_",
            r"gptoss\.attention\.head_count_kv is miss",
        ),
        (b"gptoss.attention.key_length", b"gptoss.attention.key_l_ngth", r"gptoss\.attention\.key_length is missing"),
        (b"blk.1.attn_qkv.bias", b"blk.1.attn_qkw.bias", r"q_proj\.bias is missing .*blk\.1\.attn_qkw"),
        (b"blk.1.ffn_gate_up_exps.weight", b"blk.1.ffn_gate_uq_exps.weight", r"gate_proj\.weight is missing .*gate_uq"),
        (b"blk.2.attn_sinks", b"blk.2.attn_sinqs", r"self_attn\.sinks is missing .*blk\.2\.attn_sinqs"),
        (
            b"blk.1.ffn_down_exps.bias",
            b"blk.1.ffn_gate_exps.bias",
            r"ffn_gate_exps\.bias is .*\.0\.gate_proj\.bias, which",
        ),
    ],
)
def test_missing_parts_of_a_file_are_named(
    there: bytes, instead: bytes, named: str, published: Path, tmp_path: Path
) -> None:
    path = write_ollama(published, tmp_path / "m.gguf", LAYOUTS["August 5, 2025"])
    content = path.read_bytes()
    assert content.count(there) == 1
    path.write_bytes(content.replace(there, instead))
    with pytest.raises(WeightsError, match=named):
        Engine.load(EngineConfig(model_dir=path, num_blocks=4, num_threads=1))
