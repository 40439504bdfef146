"""Reads an engine's load and cache capacity from its `/metrics`, by the names that each engine uses.

To support an engine, add a row to `ENGINE_METRICS`: the first row whose `running` metric occurs in the text applies.
Several series of one name (one per data-parallel rank) are summed; usage is their mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple


class MetricNames(NamedTuple):
    """The names of one engine's gauges.

    `capacity` is in tokens. If the engine reports blocks instead, `block_tokens` and `blocks` are gauges of their own,
    or labels of `info`.
    """

    running: str
    waiting: str
    kv_usage: tuple[str, ...] = ()  # share of KV blocks in use, 0 to 1; the first name that occurs
    capacity: str = ""
    info: str = ""
    block_tokens: str = ""
    blocks: str = ""


ENGINE_METRICS: Mapping[str, MetricNames] = {
    "vllm": MetricNames(  # and the bundled engine
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        info="vllm:cache_config_info",
        block_tokens="block_size",
        blocks="num_gpu_blocks",
    ),
    "sglang": MetricNames(
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        ("sglang:token_usage",),
        capacity="sglang:max_total_num_tokens",
        info="sglang:cache_config_info",
        block_tokens="page_size",
        blocks="num_pages",
    ),
    "llama.cpp": MetricNames(
        "llamacpp:requests_processing", "llamacpp:requests_deferred", ("llamacpp:kv_cache_usage_ratio",)
    ),
    "tensorrt-llm": MetricNames(
        "trtllm_num_requests_running",
        "trtllm_num_requests_waiting",
        ("trtllm_kv_cache_utilization",),
        block_tokens="trtllm_kv_cache_tokens_per_block",
        blocks="trtllm_kv_cache_max_blocks",
    ),
}

VALUE_MAX = 2.0**53  # of a sample; larger numbers are no counts
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_NAMES = frozenset(
    name
    for row in ENGINE_METRICS.values()
    for name in (row.running, row.waiting, *row.kv_usage, row.capacity, row.info, row.block_tokens, row.blocks)
)


class EngineLoad(NamedTuple):
    """What an engine reported: requests running and waiting, KV usage and cache capacity."""

    engine: str
    running: int
    waiting: int
    kv_usage: float
    capacity_tokens: int | None  # of the KV cache, in engine tokens


class _Sample(NamedTuple):
    labels: str
    value: float


def read_engine_load(text: str) -> EngineLoad | None:
    """Parse Prometheus' text format. None if the metrics are of no known engine."""
    samples = _samples(text)
    for engine, metric_names in ENGINE_METRICS.items():
        if metric_names.running in samples:
            usage = next((samples[name] for name in metric_names.kv_usage if name in samples), [])
            return EngineLoad(
                engine,
                running=int(_sum(samples, metric_names.running)),
                waiting=int(_sum(samples, metric_names.waiting)),
                kv_usage=sum(sample.value for sample in usage) / len(usage) if usage else 0.0,
                capacity_tokens=_capacity_tokens(samples, metric_names),
            )
    return None


def _samples(text: str) -> dict[str, list[_Sample]]:
    samples: dict[str, list[_Sample]] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or match[1] not in _NAMES:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if 0 <= value <= VALUE_MAX:  # neither NaN nor infinite
            samples.setdefault(match[1], []).append(_Sample(match[2] or "", value))
    return samples


def _sum(samples: Mapping[str, list[_Sample]], name: str) -> float:
    return sum(sample.value for sample in samples.get(name, ()))


def _capacity_tokens(samples: Mapping[str, list[_Sample]], names: MetricNames) -> int | None:
    if tokens := _sum(samples, names.capacity):
        return int(tokens)
    if names.info in samples:
        sizes = [dict(_LABEL.findall(sample.labels)) for sample in samples[names.info]]
        tokens = sum(_to_int(size.get(names.block_tokens)) * _to_int(size.get(names.blocks)) for size in sizes)
    else:
        # All ranks have the same block size, so only the numbers of blocks are summed.
        block_tokens = max((sample.value for sample in samples.get(names.block_tokens, ())), default=0.0)
        tokens = block_tokens * _sum(samples, names.blocks)
    return int(tokens) or None


def _to_int(text: str | None) -> int:
    return min(int(text), int(VALUE_MAX)) if text is not None and len(text) <= 16 and text.isdecimal() else 0
