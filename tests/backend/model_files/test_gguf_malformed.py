"""Malformed GGUF files: a one-line error that names the problem, never a traceback."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.errors import EngineError, UnsupportedModel, WeightsError
from backend.model_files import open_model_files
from backend.models.config import ModelConfig
from tests.backend.checkpoints import build_model, save
from tests.backend.gguf_writer import as_type, write_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = save(build_model("llama"), tmp_path_factory.mktemp("llama"))
    return write_gguf(directory, directory / "model.gguf", as_type(Kind.Q4_0)).read_bytes()


def load(content: bytes, directory: Path) -> Engine:
    path = directory / "model.gguf"
    path.write_bytes(content)
    return Engine.load(EngineConfig(model_dir=path, num_blocks=4, num_threads=1))


@pytest.mark.parametrize(
    ("corrupt", "named"),
    [
        (lambda whole: b"", "cannot be read"),
        (lambda whole: b"GGML" + whole[4:], "does not start with GGUF"),
        (lambda whole: whole[:4] + struct.pack("<I", 1) + whole[8:], "its version is 1, but only 2 and 3"),
        (lambda whole: whole[:4] + whole[7:3:-1] + whole[8:], "its version is 50331648"),
        (lambda whole: whole[:100], "truncated: byte .* is missing, the file has 100"),
        (lambda whole: whole[:-1], "truncated: tensor .* ends at byte"),
        (lambda whole: whole[:8] + struct.pack("<Q", 2**60) + whole[16:], "truncated|unknown|dimensions|duplicated"),
        (lambda whole: whole[:16] + struct.pack("<Q", 2**60) + whole[24:], "truncated|unknown"),
        (lambda whole: whole[:24] + struct.pack("<Q", 2**60) + whole[32:], "truncated"),
    ],
)
def test_a_malformed_file_is_named(corrupt: Any, named: str, whole: bytes, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=named) as caught:
        load(corrupt(whole), tmp_path)
    assert "model.gguf" in caught.value.message


def test_any_changed_header_byte_is_read_or_rejected(whole: bytes, tmp_path: Path) -> None:
    """Changes bytes before the tensor data: counts, lengths, types, shapes and offsets."""
    path = tmp_path / "model.gguf"
    chance, num_refused = random.Random(0), 0
    for _ in range(400):
        position = chance.randrange(2600)
        path.write_bytes(whole[:position] + chance.choice([b"\x00", b"\x06", b"\xff"]) + whole[position + 1 :])
        try:
            EngineConfig(model_dir=path, num_blocks=4, num_threads=1).resolve()
        except EngineError as error:
            assert error.message
            num_refused += 1
    assert num_refused > 100


def replaced(whole: bytes, name: str, kind: int) -> bytes:
    """Changes the type of the named matrix in the header."""
    start = whole.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) + 4 + 2 * 8
    return whole[:start] + struct.pack("<I", kind) + whole[start + 4 :]


def test_an_unknown_quantization_type_is_named(whole: bytes, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"tensor blk\.0\.ffn_up\.weight has the unknown quantization type 99"):
        load(replaced(whole, "blk.0.ffn_up.weight", 99), tmp_path)


def test_a_type_that_does_not_fit_the_rows_is_named(whole: bytes, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"rows of 64, not a multiple of Q6_K's block of 256"):
        load(replaced(whole, "blk.0.ffn_up.weight", Kind.Q6_K), tmp_path)


def test_integer_weights_are_rejected(whole: bytes, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"blk\.0\.ffn_up\.weight has the unsupported quantization type I8"):
        load(replaced(whole, "blk.0.ffn_up.weight", Kind.I8), tmp_path)


def write(tmp_path: Path, model: str = "qwen3", **fields: Any) -> Path:
    named = {key.replace("__", "."): value for key, value in fields.items()}
    return write_gguf(save(build_model(model), tmp_path), tmp_path / "m.gguf", as_type(Kind.F16), named)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"qwen3__rope__scaling__type": "su"}, "rope.scaling.type 'su'"),
        ({"qwen3__attention__value_length": 8}, "value_length differs from"),
        ({"qwen3__rope__scaling__type": "yarn", "qwen3__rope__scaling__attn_factor": 2.0}, "attn_factor is not supp"),
        ({"qwen3__rope__scaling__type": "yarn", "qwen3__rope__scaling__yarn_attn_factor": 2.0}, "yarn_attn_factor is"),
        ({"qwen3__feed_forward_length": [96, 64]}, "feed_forward_length differs from layer to layer"),
    ],
)
def test_unsupported_metadata_are_named(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=named) as caught:
        ModelConfig.load(write(tmp_path, **fields))
    assert "m.gguf" in caught.value.message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"qwen3__rope__scaling__factor": "4"}, r"qwen3\.rope\.scaling\.factor is '4', not of type float"),
        ({"qwen3__rope__scaling__factor": 0.0}, r"qwen3\.rope\.scaling\.factor is 0\.0, not above 0"),
        ({"qwen3__expert_count": 2.5}, r"qwen3\.expert_count is 2\.5, not of type int"),
        ({"tokenizer__ggml__tokens": [1, 2]}, r"tokenizer\.ggml\.tokens is not a list of type str"),
    ],
)
def test_metadata_of_another_type_are_named(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=named):
        ModelConfig.load(write(tmp_path, **fields))


def test_another_architecture_is_named(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole.replace(b"llama", b"mamba"))
    with pytest.raises(UnsupportedModel, match=r"general\.architecture 'mamba' is not one of gemma2"):
        ModelConfig.load(path)


def test_a_model_without_a_vocabulary_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.model"):
        open_model_files(write(tmp_path)).tokenizer()


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    content = path.read_bytes().replace(b"blk.1.attn_q_norm", b"blk.1.attn_z_norm")
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=r"q_norm\.weight is missing .*blk\.1\.attn_z_norm\.weight"):
        Engine.load(EngineConfig(model_dir=path, num_blocks=4, num_threads=1))


@pytest.mark.parametrize(
    ("there", "instead", "named"),
    [
        (
            b"oss.attention.sliding_window",
            b"oss.attention.sliding_wind_w",
            r"gpt-oss\.attention\.sliding_window is miss",
        ),
        (b"oss.attention.key_length", b"oss.attention.key_l_ngth", r"gpt-oss\.attention\.key_length is missing"),
        (b"blk.1.ffn_gate_exps.weight", b"blk.1.ffn_gate_exqs.weight", r"experts\.0\.gate_proj\.weight is .*gate_exqs"),
        (b"blk.1.ffn_up_exps.bias", b"blk.1.ffn_up_exqs.bias", r"experts\.0\.up_proj\.bias is .*up_exqs"),
        (b"blk.2.attn_sinks.weight", b"blk.2.attn_sinqs.weight", r"self_attn\.sinks is missing .*attn_sinqs"),
    ],
)
def test_missing_parts_of_gpt_oss_are_named(there: bytes, instead: bytes, named: str, tmp_path: Path) -> None:
    content = write(tmp_path, "gpt-oss").read_bytes()
    assert content.count(there) == 1
    with pytest.raises(WeightsError, match=named):
        load(content.replace(there, instead), tmp_path)


def test_a_missing_file_of_several_is_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    first = path.rename(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(WeightsError, match=r"m-00002-of-00002\.gguf cannot be read"):
        ModelConfig.load(first)
