"""A model in a GGUF file equals the model that it was converted from, compared with transformers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.model_files import open_model_files
from backend.model_files.gguf_blocks import BlockTensor
from backend.model_files.mxfp4 import Mxfp4Tensor
from backend.model_files.quantized_tensor import dequantized
from backend.models.config import ModelConfig
from tests.backend.checkpoints import VOCAB_SIZE, build_model, random_mxfp4, save, save_gpt_oss_in_mxfp4
from tests.backend.gguf_writer import Array, as_type, experts_in_mxfp4, write_gguf
from tests.backend.recorded_logits import record_logits

PROMPT = [(7 * i * i + 3 * i) % VOCAB_SIZE for i in range(150)]
# The tests' checkpoints, with the values that GGUF cannot store because llama.cpp derives them.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biased": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3-moe": {"mlp_only_layers": []},
    "phi3": {},
    "phi3-longrope": {},
    "gemma2": {"query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "gemma3": {"query_pre_attn_scalar": 24},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "olmo2": {},
    "granite": {},
    "gpt-oss": {},
}


def next_logits(path: Path) -> torch.Tensor:
    engine = Engine.load(EngineConfig(model_dir=path, dtype="float32", num_blocks=16, num_threads=1))
    seen = record_logits(engine)
    engine.add(Request("r", PROMPT, SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)))
    engine.step()
    return seen[0][0]


def rounded(model: PreTrainedModel, change: Callable[[torch.Tensor], torch.Tensor]) -> PreTrainedModel:
    """Applies `change` to all matrices except routers and biases that are one tensor for all experts."""
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and not name.endswith((".gate.weight", "router.weight", "_bias")):
            parameter.data = change(parameter.data)
    return model


def expected_logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0, -1]
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = build_model(name, **MODELS[name])
    path = write_gguf(save(model, tmp_path), tmp_path / "model.gguf", as_type(Kind.F16))
    expected = expected_logits(rounded(model, lambda tensor: tensor.half().float()))
    assert (next_logits(path) - expected).abs().max().item() < 1e-4


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.Q8_0, Kind.Q4_0])
def test_quantized_weights_equal_their_dequantized_values(kind: Kind, tmp_path: Path) -> None:
    model = build_model("llama")
    path = write_gguf(save(model, tmp_path), tmp_path / "model.gguf", as_type(kind))
    back = rounded(model, lambda t: torch.from_numpy(gguf.dequantize(gguf.quantize(t.numpy(), kind), kind)))
    assert (next_logits(path) - expected_logits(back)).abs().max().item() < 1e-4


def q4_k(values: Array) -> Array:
    """Quantizes each run of 32 values by its minimum and maximum, in the layout of ggml's `block_q4_K`.

    A block of 256 values has two float16 factors, twelve bytes of scales and minima in six bits each, and the values in
    four bits.
    """
    runs = values.reshape(-1, 8, 32).astype(np.float64)
    minima = np.maximum(-runs.min(-1), 0.0)
    scales = np.maximum((runs.max(-1) + minima) / 15, 1e-6)
    factor, min_factor = (part.max(-1).astype(np.float64) / 63 + 1e-9 for part in (scales, minima))
    scale6, min6 = (np.clip(np.rint(p / f[:, None]), 0, 63) for p, f in ((scales, factor), (minima, min_factor)))
    steps = np.maximum(scale6 * factor[:, None], 1e-9)[..., None]
    nibbles = np.clip(np.rint((runs + (min6 * min_factor[:, None])[..., None]) / steps), 0, 15).astype(np.uint8)
    packed = np.zeros((len(runs), 12), np.uint8)
    s, m = scale6.astype(np.uint8), min6.astype(np.uint8)
    packed[:, 0:4] = s[:, :4] | (s[:, 4:] >> 4 << 6)
    packed[:, 4:8] = m[:, :4] | (m[:, 4:] >> 4 << 6)
    packed[:, 8:12] = (s[:, 4:] & 15) | ((m[:, 4:] & 15) << 4)
    quants = (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).reshape(len(runs), -1)
    factors = np.stack([factor, min_factor], -1).astype(np.float16).view(np.uint8)
    blocks = np.concatenate([factors, packed, quants], -1)
    return blocks.reshape(*values.shape[:-1], -1)


def test_q4_k_is_read_as_it_was_written(tmp_path: Path) -> None:
    model = build_model("llama", hidden_size=256, intermediate_size=256)

    def quantise(name: str, values: Array) -> tuple[Array, Kind]:
        return (values, Kind.F32) if values.ndim == 1 else (q4_k(values), Kind.Q4_K)

    path = write_gguf(save(model, tmp_path), tmp_path / "model.gguf", quantise)
    back = rounded(model, lambda t: torch.from_numpy(gguf.dequantize(q4_k(t.numpy()), Kind.Q4_K)))
    weight = "model.layers.0.mlp.down_proj.weight"
    error = (back.get_parameter(weight) - model.get_parameter(weight)).abs().max().item()
    assert error < 0.15, "four bits of values that go from -1 to 1: else this is no Q4_K"
    assert (next_logits(path) - expected_logits(back)).abs().max().item() < 1e-4


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The published layout and llama.cpp's, with the same numbers."""
    directory = tmp_path_factory.mktemp("gpt-oss")
    save_gpt_oss_in_mxfp4(directory / "plain", directory / "published")
    path = write_gguf(directory / "plain", directory / "model.gguf", experts_in_mxfp4(others=Kind.F32))
    return directory / "published", path


def test_gpt_oss_equals_the_published_checkpoint_to_the_bit(gpt_oss: tuple[Path, Path]) -> None:
    published, path = gpt_oss
    kinds = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors}
    assert kinds["blk.0.ffn_gate_exps.weight"] == Kind.MXFP4
    assert torch.equal(next_logits(path), next_logits(published))


def test_the_configuration_of_gpt_oss_equals_the_published_one(gpt_oss: tuple[Path, Path]) -> None:
    published, path = gpt_oss
    ours, expected = ModelConfig.load(path), ModelConfig.load(published)
    in_float32 = float(np.float32(expected.rms_norm_eps))
    # The eos tokens come from the vocabulary, and this file has none.
    assert ours == dataclasses.replace(expected, rms_norm_eps=in_float32, eos_token_ids=frozenset())


@pytest.mark.parametrize("shape", [(5, 2), (3, 4, 6)])
def test_mxfp4_blocks_equal_those_of_the_published_checkpoint(shape: tuple[int, ...]) -> None:
    """A GGUF block has scale and numbers together, and each byte has one number of each half instead of a pair."""
    torch.manual_seed(1)
    blocks, scales = random_mxfp4(*shape)
    numbers = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    ggml = torch.cat((scales[..., None], numbers[..., :16] | (numbers[..., 16:] << 4)), dim=-1).flatten(-2)
    ours = gguf.dequantize(ggml.numpy(), Kind.MXFP4)
    assert torch.equal(torch.from_numpy(ours), Mxfp4Tensor.from_adjacent_pairs(blocks, scales).dequantize())


def test_query_rows_can_be_quantized_in_interleaved_order(tmp_path: Path) -> None:
    """Whole rows are reordered, so the values that share a block do not change."""
    model = build_model("llama")
    path = write_gguf(save(model, tmp_path), tmp_path / "model.gguf", as_type(Kind.Q8_0))
    with open_model_files(path).tensors() as tensors:
        ours = dequantized(tensors["model.layers.1.self_attn.k_proj.weight"]())
    theirs = model.get_parameter("model.layers.1.self_attn.k_proj.weight")
    assert torch.allclose(ours, theirs, atol=0.02)


def test_a_matrix_that_stays_quantized_is_a_view_of_the_file(tmp_path: Path) -> None:
    """So that loading copies it once, into the kernels' layout."""
    path = write_gguf(save(build_model("qwen3"), tmp_path), tmp_path / "model.gguf", as_type(Kind.Q8_0))
    with open_model_files(path).tensors() as tensors:
        read = tensors["model.layers.1.mlp.up_proj.weight"]
        first, second = read(), read()
    assert isinstance(first, BlockTensor)
    assert isinstance(second, BlockTensor)
    assert first.parts[0].blocks.data_ptr() == second.parts[0].blocks.data_ptr()
    del tensors, read, second
    stored = gguf.GGUFReader(path).tensors
    assert first.parts[0].blocks.numpy().tobytes() in {tensor.data.tobytes() for tensor in stored}


def test_a_model_in_several_files(tmp_path: Path) -> None:
    model = build_model("qwen3")
    whole = write_gguf(save(model, tmp_path), tmp_path / "model.gguf", as_type(Kind.F16))
    halves = [set[str](), set[str]()]
    for i, tensor in enumerate(gguf.GGUFReader(whole).tensors):
        halves[i % 2].add(tensor.name)
    paths = [tmp_path / f"model-0000{i}-of-00002.gguf" for i in (1, 2)]
    for path, half in zip(paths, halves, strict=True):
        write_gguf(tmp_path, path, as_type(Kind.F16), only=half)
    assert torch.equal(next_logits(paths[0]), next_logits(whole))


def test_sampling_metadata_become_the_generation_config(tmp_path: Path) -> None:
    directory = save(build_model("qwen3"), tmp_path)
    fields = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    path = write_gguf(directory, tmp_path / "model.gguf", as_type(Kind.F16), fields)
    assert open_model_files(path).generation_config() == {"temperature": pytest.approx(0.6), "top_k": 20}


def test_the_dtype_is_that_of_the_embeddings(tmp_path: Path) -> None:
    directory = save(build_model("qwen3"), tmp_path)
    kinds: dict[Kind, str] = {Kind.F32: "float32", Kind.F16: "float16", Kind.Q8_0: "bfloat16"}
    for kind, dtype in kinds.items():
        path = write_gguf(directory, tmp_path / f"{kind.name}.gguf", as_type(kind))
        assert open_model_files(path).config()["dtype"] == dtype


def test_the_memory_of_the_weights_is_known_before_they_are_read(tmp_path: Path) -> None:
    model = build_model("llama")
    path = write_gguf(save(model, tmp_path), tmp_path / "model.gguf", as_type(Kind.Q8_0))
    expected = 2 * model.num_parameters()
    assert open_model_files(tmp_path).weights_bytes(torch.bfloat16) == expected
    frequencies = 2 * 8  # of rope_freqs, half a head
    assert open_model_files(path).weights_bytes(torch.bfloat16) == expected + frequencies
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)
    stored = open_model_files(path).weights_bytes(torch.bfloat16, stays_quantized=True)
    assert stored == expected + frequencies - 2 * matrices + matrices * 34 // 32
