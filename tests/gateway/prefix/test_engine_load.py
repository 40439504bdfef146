"""Parsing the load and cache capacity of each engine's metrics."""

from __future__ import annotations

import pytest

from gateway.prefix.engine_load import EngineLoad, read_engine_load

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="Qwen/Qwen3-32B"} 3.0
vllm:num_requests_running{engine="1",model_name="Qwen/Qwen3-32B"} 4.0
vllm:num_requests_waiting{engine="0",model_name="Qwen/Qwen3-32B"} 0.0
vllm:num_requests_waiting{engine="1",model_name="Qwen/Qwen3-32B"} 12.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="Qwen/Qwen3-32B",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="Qwen/Qwen3-32B"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="Qwen/Qwen3-32B"} 0.75
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000",prefix="a\\"b,c"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="1000",num_cpu_blocks="None"} 1.0
"""
SGLANG = """sglang:num_running_reqs{model_name="m"} 7.0
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.5
sglang:max_total_num_tokens{model_name="m"} 471258.0
sglang:cache_config_info{page_size="1",num_pages="5"} 1.0
"""
SGLANG_BEFORE = """sglang:num_running_reqs 1
sglang:num_queue_reqs 0
sglang:cache_config_info{page_size="64",num_pages="100"} 1.0
"""
LLAMA_CPP = """# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 4
llamacpp:requests_deferred 46
"""
TENSORRT = """trtllm_num_requests_running{model_name="m",engine_type="trtllm"} 1
trtllm_num_requests_waiting{model_name="m",engine_type="trtllm"} 5
trtllm_kv_cache_utilization{model_name="m"} 0.62 1714000000000
trtllm_kv_cache_tokens_per_block 32
trtllm_kv_cache_max_blocks 2000
"""


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        (VLLM, EngineLoad("vllm", 7, 12, 0.5, 32_000)),
        (VLLM.replace("kv_cache_usage_perc", "gpu_cache_usage_perc"), EngineLoad("vllm", 7, 12, 0.5, 32_000)),
        (SGLANG, EngineLoad("sglang", 7, 2, 0.5, 471_258)),
        (SGLANG_BEFORE, EngineLoad("sglang", 1, 0, 0.0, 6_400)),
        (LLAMA_CPP, EngineLoad("llama.cpp", 4, 46, 0.0, None)),
        (TENSORRT, EngineLoad("tensorrt-llm", 1, 5, 0.62, 64_000)),
    ],
    ids=["vllm", "vllm before 2025", "sglang", "sglang before 0.5.11", "llama.cpp", "tensorrt-llm"],
)
def test_each_engine_is_read_by_its_own_names(text: str, reported: EngineLoad) -> None:
    assert read_engine_load(text) == reported


@pytest.mark.parametrize(
    "text",
    ["", "not metrics at all", "<html>", "go_goroutines 8", "vllm:num_requests_running{} many", "\x00" * 100],
)
def test_metrics_of_no_known_engine_are_none(text: str) -> None:
    assert read_engine_load(text) is None


def test_values_that_are_not_finite_are_ignored() -> None:
    load = read_engine_load(
        "vllm:num_requests_running 1\nvllm:kv_cache_usage_perc NaN\nvllm:num_requests_waiting +Inf\n"
    )
    assert load == EngineLoad("vllm", 1, 0, 0.0, None)
