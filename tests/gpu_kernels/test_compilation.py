"""Every kernel compiles for common GPUs, within their shared memory and registers.

Triton compiles without a GPU. The tests compile in a separate process, since the interpreter replaces the compiler in
this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="the triton package is not installed: make test-triton installs it")

SHARED_MEMORY_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}  # maximum per program, by compute capability
FP8_KERNELS = {"round_to_fp8", "norm_round_to_fp8", "gate_round_to_fp8"}
# Of kernels for bfloat16; float32 is for comparisons only. `sample_rows` spills 336 where it searches a whole row with
# penalties, which few rows need.
MAX_SPILL_BYTES = 384


def output_of(module: str, *arguments: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("capability", SHARED_MEMORY_BYTES)
def test_every_kernel_compiles(capability: int) -> None:
    kernels = output_of("tests.gpu_kernels.compilation", str(capability))
    assert {kernel["name"] for kernel in kernels} | (FP8_KERNELS if capability < 89 else set()) >= {
        "attend_chunks", "join_chunks", "attend_decodes", "join_splits",
        "rms_norm", "rope", "norm_rope_store", "gated", "store_kv", "linear_int8", "linear_int4",
        "sample_rows", "score_rows", "linear_row", *FP8_KERNELS,
        "route", "count_assignments", "group_assignments", "expert_product", "combine",
    }  # fmt: skip
    for kernel in kernels:
        assert kernel["shared_bytes"] <= SHARED_MEMORY_BYTES[capability], kernel
        assert kernel["spill_bytes"] <= MAX_SPILL_BYTES or "float32" in kernel["case"], kernel
    # The same instruction in small and large tiles, so that a row's sums are the same. Float32 does not use it.
    products = {(*kernel["products"],) for kernel in kernels if kernel["name"] == "expert_product"}
    assert len(products - {()}) == 1


@pytest.mark.parametrize(
    ("checkpoint", "options"),
    [
        ("qwen3", {}),
        ("qwen3-moe", {}),
        ("qwen3-moe", {"quantization": "fp8"}),
        ("llama", {"quantization": "int8", "kv_cache_dtype": "int8"}),
    ],
    ids=str,
)
def test_no_request_waits_for_a_kernel_to_be_compiled(checkpoint: str, options: dict[str, str]) -> None:
    """Triton compiles a kernel again if the alignment of an argument differs: if an address is not a multiple of 16."""
    (launches,) = output_of("tests.gpu_kernels.launches", checkpoint, json.dumps(options))
    assert launches["serving"]
    assert {name for key, name in launches["serving"].items() if key not in launches["before"]} == set()
