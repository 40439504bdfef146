"""Compiles the kernels that a model's layers launch, for a GPU that need not be present, and reports their resources.

    python -m tests.gpu_kernels.compilation CAPABILITY        80, 89, 90: one line of JSON for each kernel

The layers are called as the engine calls them, with tensors on the CPU. Where a kernel would be launched, it is only
compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from backend.attention import triton as triton_attention
from backend.attention.base import AttentionMetadata, AttentionVariant, AttentionWork
from backend.attention.triton import TritonAttention
from backend.kv_cache import create_kv_format
from backend.ops import triton as triton_ops
from backend.ops.base import INT4_GROUP, HeadNorms
from backend.ops.experts import LinearWeight
from backend.ops.sampling import MAX_BIASES, RandomRows, SamplingFilters, StepRows
from backend.ops.triton import TritonOps
from backend.quantization import create_quantization

BLOCK_SIZE, CONTEXT = 16, 64
RUN = JITFunction.run


def attend(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    variant: AttentionVariant | None = None,
    kv_cache_dtype: str = "auto",
) -> None:
    """A step with a chunk of a prompt and a decode, and a decode alone."""
    kv_format = create_kv_format(kv_cache_dtype, scales_apart=True)
    width = kv_format.width(head_dim)
    cache = torch.zeros(CONTEXT, BLOCK_SIZE, kv_heads, width, dtype=kv_format.dtype(dtype))
    metadata = AttentionMetadata(
        query_lens=(1, 40),
        seq_lens=(CONTEXT, CONTEXT),
        kv_lens=torch.full((2,), CONTEXT, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 1, 41], dtype=torch.int32),
        block_tables=torch.zeros(2, CONTEXT // BLOCK_SIZE, dtype=torch.int32),
        block_size=BLOCK_SIZE,
    )
    step = TritonAttention(0.1, kv_format).prepare(metadata, cache)
    step(torch.zeros(41, heads, head_dim, dtype=dtype), cache, cache, variant or AttentionVariant())
    tiles = torch.zeros(2, 2, dtype=torch.int32)
    captured = replace(metadata, work=AttentionWork(tiles[0], tiles, 40))
    step = TritonAttention(0.1, kv_format).prepare(captured, cache)
    step(torch.zeros(41, heads, head_dim, dtype=dtype), cache, cache, variant or AttentionVariant())
    alone = replace(metadata, query_lens=(1,), seq_lens=(CONTEXT,), kv_lens=metadata.kv_lens[:1])
    step = TritonAttention(0.1, kv_format).prepare(alone, cache)
    step(torch.zeros(1, heads, head_dim, dtype=dtype), cache, cache, variant or AttentionVariant())


def compute(hidden: int, inner: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """All other operations of a layer."""
    ops, rows = TritonOps(), 3
    x, weight = torch.zeros(rows, hidden, dtype=dtype), torch.zeros(hidden, dtype=dtype)
    ops.rms_norm(x, weight, 1e-6)
    ops.add_rms_norm(x, x, weight, 1e-6)
    by_heads = torch.zeros(rows, heads, head_dim, dtype=dtype)
    ops.rms_norm(by_heads, weight[:head_dim], 1e-6)
    angles = torch.zeros(rows, head_dim // 2)
    ops.rope(by_heads, angles, angles)
    ops.silu_mul(torch.zeros(rows, 2 * inner, dtype=dtype))
    ops.swiglu_oai(torch.zeros(rows, 2 * inner, dtype=dtype))
    ops.gelu_mul(torch.zeros(rows, 2 * inner, dtype=dtype))
    cache = torch.zeros(4, BLOCK_SIZE, heads, head_dim, dtype=dtype)
    ops.store_kv(by_heads, by_heads, cache, cache, torch.zeros(rows, dtype=torch.int64))
    row, square = torch.zeros(1, hidden, dtype=dtype), torch.zeros(hidden, hidden, dtype=dtype)
    ops.linear(row, square, None)
    ops.norm_linear(row, row, weight, 1e-6, torch.zeros(2 * inner, hidden, dtype=dtype), None, "silu")
    qkv, slots = torch.zeros(rows, 3 * heads * head_dim, dtype=dtype), torch.zeros(rows, dtype=torch.int64)
    for norms in (None, HeadNorms(weight[:head_dim], weight[:head_dim], 1e-6)):
        ops.norm_rope_store(qkv, norms, (angles, angles), (cache, cache), slots)
        ops.norm_rope_store(qkv[:1], norms, (angles[:1], angles[:1]), (cache, cache), slots[:1])
    logits, parameter = torch.zeros(rows, 32_000), torch.ones(rows)
    whole = torch.arange(rows)
    for filters in (None, SamplingFilters(whole, whole, parameter, parameter)):
        ops.draw(logits, RandomRows(whole, parameter, parameter.double(), filters))
    words = torch.zeros(rows, 1000, dtype=torch.int32)
    of_step = StepRows(
        whole, whole, parameter, parameter.double(), whole, parameter, parameter, parameter, parameter, parameter,
        logits.int(), torch.zeros(rows, MAX_BIASES + 1), whole, words,
    )  # fmt: skip
    for has_changes in (False, True):
        ops.sample_rows(logits, of_step, has_changes=has_changes)
    ops.score_rows(logits, of_step, whole, num_top=20)
    for count in (1, 64):
        x = torch.zeros(count, hidden, dtype=dtype)
        ops.linear_int8(x, torch.zeros(inner, hidden, dtype=torch.int8), torch.zeros(inner), None)
        packed = torch.zeros(inner, hidden // 2, dtype=torch.uint8)
        scales = torch.zeros(inner, hidden // INT4_GROUP, dtype=torch.bfloat16)
        ops.linear_int4(x, packed, scales, torch.zeros(inner, dtype=dtype))


@dataclass(frozen=True)
class Mlp:
    weights: tuple[LinearWeight, LinearWeight]

    def __call__(self, x: Tensor, /) -> Tensor:
        raise NotImplementedError


def mix(
    hidden: int, inner: int, dtype: torch.dtype, quantization: str, num_experts: int = 8, num_chosen: int = 2
) -> None:
    """A mixture of experts, with few tokens and with many."""
    ops = TritonOps()
    linear = create_quantization(quantization, ops).linear
    bias = torch.zeros(2 * inner, dtype=dtype)
    first = linear(torch.zeros(2 * inner, hidden, dtype=dtype), bias, "silu").packed_weight
    second = linear(torch.zeros(hidden, inner, dtype=dtype), None).packed_weight
    assert first and second
    mixture = ops.mixture_of_experts([Mlp((first, second))] * num_experts)
    for rows in (1, 16 * num_experts):
        x, scores = torch.zeros(rows, hidden, dtype=dtype), torch.zeros(rows, num_experts, dtype=dtype)
        mixture(x, *ops.route(scores, num_chosen, normalise=True))


def round_inputs(*dims: int) -> None:
    for dim in dims:
        x = torch.zeros(3, dim, dtype=torch.bfloat16)
        TritonOps().round_to_fp8(x)
        TritonOps().norm_round_to_fp8(x, x, x[0], 1e-6)
        TritonOps().gate_round_to_fp8(torch.cat((x, x), dim=1), "silu")


def resources(cubin: bytes) -> dict[str, int]:
    """The resources of a kernel, according to NVIDIA's cuobjdump."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", output)}


CASES: dict[str, Callable[[], object]] = {
    "Llama 3 8B": lambda: attend(32, 8, 128, torch.bfloat16),
    "Qwen3 0.6B": lambda: attend(16, 8, 128, torch.bfloat16),
    "Gemma 2": lambda: attend(8, 4, 256, torch.bfloat16, AttentionVariant(window=4096, softcap=50.0)),
    "gpt-oss": lambda: attend(64, 8, 64, torch.bfloat16, AttentionVariant(window=128, sinks=torch.zeros(64))),
    "Phi 3": lambda: attend(32, 32, 96, torch.bfloat16, AttentionVariant(window=2047)),
    "float32": lambda: attend(14, 2, 64, torch.float32),
    "int8 cache": lambda: attend(32, 8, 128, torch.bfloat16, kv_cache_dtype="int8"),
    "fp8 cache": lambda: attend(32, 8, 128, torch.bfloat16, kv_cache_dtype="fp8_e4m3"),
    "ops": lambda: compute(4096, 14336, 8, 128, torch.bfloat16),
    "experts": lambda: mix(2048, 768, torch.bfloat16, "none"),
    "int8 experts": lambda: mix(2048, 768, torch.bfloat16, "int8"),
    "int4 experts": lambda: mix(2048, 768, torch.bfloat16, "int4"),
    "fp8 experts": lambda: mix(2048, 768, torch.bfloat16, "fp8"),
    "fp8 inputs": lambda: round_inputs(512, 14336),
    "float32 experts": lambda: mix(512, 256, torch.float32, "none"),
    "float32 ops": lambda: compute(896, 4864, 2, 64, torch.float32),
}


def only_compile(capability: int, report: Callable[[str, Any], None]) -> None:
    """From now on, a launch only compiles its kernel. `report` gets the name and the compiled kernel."""
    no_gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    driver.set_active(no_gpu)

    def compiled(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        report(kernel.fn.__name__, RUN(kernel, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compiled


def compile_all(capability: int, report: Callable[[str, str, Any], None]) -> None:
    """`report` gets the case, the name and the compiled kernel of each launch."""
    for case, launch in CASES.items():
        if case.startswith("fp8") and capability < 89:  # such GPUs have no fp8
            continue
        attention: Any = triton_attention
        ops: Any = triton_ops
        attention.chunk_tiles = lambda device: triton_attention.CHUNK_TILES[capability >= 90]
        attention.starts_early = ops.starts_early = lambda device: capability >= 90
        attention._num_units = lambda device: 132
        only_compile(capability, partial(report, case))
        launch()


def main() -> None:
    def report(case: str, name: str, kernel: Any) -> None:
        used = resources(kernel.asm["cubin"])
        spilled, shared = used["STACK"] + used["LOCAL"], kernel.metadata.shared
        figures = {"case": case, "name": name, "registers": used["REG"], "spill_bytes": spilled, "shared_bytes": shared}
        products = {*re.findall(r"\b(?:mma|wgmma|tcgen05)\.[\w.]+", kernel.asm["ptx"])}
        print(json.dumps(figures | {"products": sorted(products)}), flush=True)

    compile_all(int(sys.argv[1]), report)


if __name__ == "__main__":
    main()
