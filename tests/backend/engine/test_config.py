from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from backend.engine import config
from backend.engine.config import EngineConfig
from backend.engine.errors import ConfigError, RequestRefused
from backend.engine.sampling_params import SamplingParams
from backend.engine.step_limits import StepLimits, choose_step_limits
from backend.model_files import open_model_files
from backend.model_files.base import bytes_of_weights
from backend.model_files.directory import ModelDirectory
from backend.native import library
from backend.quantization import bits_per_weight


@pytest.fixture
def directory(checkpoint_dir: Callable[[str], Path]) -> Path:
    return checkpoint_dir("llama")


def test_every_open_choice_is_made(directory: Path) -> None:
    resolved = EngineConfig(model_dir=directory, device="cpu").resolve()
    assert (resolved.dtype, resolved.device) == (torch.float32, torch.device("cpu"))
    fast = ("native", "native") if library.load() else ("sdpa", "reference")
    assert (resolved.attention, resolved.ops) == fast
    assert resolved.num_threads >= 1
    assert resolved.max_model_len == 512


def test_the_number_of_blocks_follows_from_the_memory(directory: Path) -> None:
    # 2 layers of keys and values, 16 tokens, 2 heads of 16 values.
    block_bytes = 2 * 2 * 16 * 2 * 16
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        memory = 10 * block_bytes * itemsize + 1
        resolved = EngineConfig(model_dir=directory, dtype=dtype, kv_cache_memory_bytes=memory).resolve()
        assert resolved.num_blocks == 10
        assert resolved.max_model_len == 160  # as many tokens as fit


GIB = 1 << 30


def test_the_cache_of_a_small_model_follows_from_the_free_memory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = open_model_files(directory).weights_bytes(torch.float32)
    for free, expected in ((64 * GIB, GIB), (GIB, (GIB - weights) // 2), (None, GIB)):
        monkeypatch.setattr(config, "free_memory_bytes", lambda device, free=free: free)
        resolved = EngineConfig(model_dir=directory, dtype="float32", device="cpu").resolve()
        assert resolved.num_blocks == expected // 8192


def test_the_cache_of_a_large_model_is_as_large_as_its_weights(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "free_memory_bytes", lambda device: 100 * GIB)
    monkeypatch.setattr(ModelDirectory, "weights_bytes", lambda self, dtype, bits, stays_quantized: 16 * GIB)
    assert EngineConfig(model_dir=directory, dtype="float32", device="cpu").resolve().num_blocks == 16 * GIB // 8192
    monkeypatch.setattr(config, "free_memory_bytes", lambda device: 20 * GIB)
    assert EngineConfig(model_dir=directory, dtype="float32", device="cpu").resolve().num_blocks == 2 * GIB // 8192


@pytest.mark.parametrize(("quantization", "bits"), [("none", 16), ("int8", 8), ("fp8", 8), ("int4", 4.5)])
def test_the_weights_are_counted_in_the_form_that_they_take(directory: Path, quantization: str, bits: float) -> None:
    embedding, linear = 256 * 64, 10_000
    assert bits_per_weight(quantization) in (bits, None)
    shapes = {"model.embed_tokens.weight": (256, 64), "model.layers.0.mlp.up_proj.weight": (100, 100), "norm": (7,)}
    counted = bytes_of_weights(shapes, torch.bfloat16, bits_per_weight(quantization))
    assert counted == int(2 * embedding + linear * bits / 8 + 2 * 7)


def write_headers_of_8b(path: Path) -> Path:
    """Writes the header of Llama 3.1 8B in llama.cpp's mix Q4_K_M. Its weights are a hole in the file."""
    layers, size, inner, vocab, kv = 32, 4096, 14336, 128_256, 1024
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(131_072)
    writer.add_embedding_length(size)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(32)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    shapes = {"token_embd": (vocab, size), "output": (vocab, size)}
    layer = {"attn_q": (size, size), "attn_k": (kv, size), "attn_v": (kv, size), "attn_output": (size, size)}
    layer |= {"ffn_gate": (inner, size), "ffn_up": (inner, size), "ffn_down": (size, inner)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}
    more = {f"blk.{i}" for i in range(layers) if i < 4 or i >= 28 or i % 3 == 0}
    num_bytes = 0
    for name, shape in shapes.items():
        prefix, _, module = name.rpartition(".")
        takes_more = name == "output" or (prefix in more and module in ("attn_v", "ffn_down"))
        kind = GGMLQuantizationType.Q6_K if takes_more else GGMLQuantizationType.Q4_K
        stored = gguf.quant_shape_to_byte_shape(shape, kind)
        writer.add_tensor_info(f"{name}.weight", stored, np.dtype(np.uint8), math.prod(stored), kind)
        num_bytes += math.prod(stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + num_bytes + 1024)  # 1024: more than the alignment of the data
    return path


@pytest.mark.skipif(library.load() is None, reason="without kernels, weights are expanded")
def test_a_model_of_8b_in_q4_k_m_fits_on_a_laptop_with_16_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_headers_of_8b(tmp_path / "model.gguf")
    free = 12 * GIB  # while a desktop takes 4 GiB
    monkeypatch.setattr(config, "free_memory_bytes", lambda device: free)
    resolved = EngineConfig(model_dir=path, device="cpu").resolve()
    weights = open_model_files(path).weights_bytes(torch.bfloat16, stays_quantized=True)
    assert 4.5 * GIB < weights < 4.8 * GIB
    assert open_model_files(path).weights_bytes(torch.bfloat16) > free  # if they were expanded
    bytes_of_token = 32 * 2 * 8 * 128 * 2
    cached = resolved.num_blocks * resolved.block_size
    assert cached >= resolved.max_model_len > 24_000
    assert weights + cached * bytes_of_token < 0.75 * free


def test_a_machine_without_room_for_a_cache_is_an_error(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "free_memory_bytes", lambda device: 0)
    with pytest.raises(ConfigError, match="0 bytes of KV cache are too few"):
        EngineConfig(model_dir=directory, device="cpu").resolve()


def test_a_quantised_cache_has_more_blocks_and_the_same_attention(directory: Path) -> None:
    config = EngineConfig(model_dir=directory, dtype="bfloat16", kv_cache_memory_bytes=1 << 20, device="cpu")
    plain, quantised = config.resolve(), replace(config, kv_cache_dtype="int8").resolve()
    assert quantised.num_blocks == plain.num_blocks * 2 * 16 // (16 + 4)
    assert quantised.attention == plain.attention


@pytest.mark.parametrize(
    ("gib", "given", "expected"),
    [
        (24, (None, None), (256, 2048)),
        (80, (None, None), (256, 8192)),
        (80, (512, None), (512, 8192)),
        (80, (None, 100), (100, 100)),  # fewer sequences, because each needs a token
        (24, (4096, None), (4096, 4096)),
        (24, (8, 16), (8, 16)),
    ],
)
def test_a_gpu_runs_larger_steps(
    monkeypatch: pytest.MonkeyPatch, gib: int, given: tuple[int | None, int | None], expected: tuple[int, int]
) -> None:
    properties = SimpleNamespace(total_memory=gib << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert choose_step_limits(torch.device("cuda", 0), *given) == StepLimits(*expected)
    assert choose_step_limits(torch.device("cpu"), None, None) == StepLimits(64, 512)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"dtype": "float16"}, "dtype"),
        ({"attention": "flash"}, "attention"),
        ({"ops": "cuda"}, "ops"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype"),
        ({"quantization": "awq"}, "quantization"),
        ({"block_size": 0}, "block_size"),
        ({"num_blocks": -1}, "num_blocks"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, "max_num_batched_tokens"),
        ({"num_blocks": 8, "kv_cache_memory_bytes": 1 << 20}, "num_blocks"),
        ({"kv_cache_memory_bytes": 100}, "kv_cache_memory_bytes"),
        ({"max_model_len": 513}, "max_model_len"),
        ({"device": "tpu"}, "device"),
        ({"device": "meta"}, "device"),
        ({"device": "cuda:99"}, "device"),
        ({"model_dir": Path("/nowhere")}, "model_dir"),
    ],
)
def test_a_config_that_cannot_work_is_rejected_by_field_name(
    directory: Path, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{"model_dir": directory, **options}).resolve()
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.5),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", float("inf")),
        ("repetition_penalty", 0.0),
        ("logit_bias", {3: float("nan")}),
        ("min_tokens", 17),
        ("logprobs", 21),
    ],
)
def test_sampling_out_of_range_is_rejected_by_field_name(param: str, value: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        SamplingParams(**{"max_tokens": 16, param: value})
    assert caught.value.param == param


@pytest.mark.parametrize("family", ["attention", "ops"])
def test_triton_without_a_gpu_is_rejected(directory: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr(config, "runs_triton", lambda device: False)
    with pytest.raises(ConfigError, match="needs a GPU and the triton package") as refused:
        EngineConfig(model_dir=directory, device="cpu", **{family: "triton"}).resolve()  # type: ignore[arg-type]
    assert refused.value.param == family


def test_a_gpu_uses_triton_if_it_is_installed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30))
    for has_triton, expected in ((True, ("triton", "triton")), (False, ("sdpa", "reference"))):
        monkeypatch.setattr(config, "runs_triton", lambda device, has_triton=has_triton: has_triton)
        resolved = EngineConfig(model_dir=directory, num_blocks=8, num_threads=1).resolve()
        assert (resolved.attention, resolved.ops) == expected
        # Their conversion of eight-bit floats needs newer ones.
        fp8 = EngineConfig(model_dir=directory, num_blocks=8, num_threads=1, kv_cache_dtype="fp8_e4m3").resolve()
        assert (fp8.attention, fp8.ops) == ("sdpa", expected[1])
        with pytest.raises(ConfigError) as refused:
            EngineConfig(
                model_dir=directory, num_blocks=8, num_threads=1, attention="triton", kv_cache_dtype="fp8_e4m3"
            ).resolve()
        assert refused.value.param == "attention"
    with pytest.raises(ConfigError, match=r"capability 9\.0"):
        EngineConfig(model_dir=directory, num_blocks=8, quantization="fp8").resolve()
