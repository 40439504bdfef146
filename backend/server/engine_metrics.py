"""Exports the engine's counters as Prometheus metrics, under vLLM's names and labels.

The collector reads `AsyncEngine.stats()` at each scrape. It also exports series that are always zero for this engine
if vLLM's dashboards add them to other series.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from backend.engine.async_engine import AsyncEngine
from backend.engine.counters import STEP_TOKENS_BOUNDS
from backend.engine.engine_stats import EngineStats

LABELS = ("model_name", "engine")
ENGINE = "0"  # vLLM's data-parallel rank; this engine has one


class EngineCollector(Collector):
    """Prometheus collector of one engine's counters. Safe to scrape from any thread."""

    def __init__(self, engine: AsyncEngine, model_name: str, block_size: int) -> None:
        self._engine = engine
        self._labels = (model_name, ENGINE)
        self._block_size = block_size

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield self._split(
            CounterMetricFamily,
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            "position",
            {str(place): accepted for place, accepted in enumerate(stats.accepted_tokens_total)},
        )
        yield self._step_tokens(stats)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Configuration of the KV cache.", labels=(*LABELS, "block_size", "num_gpu_blocks")
        )
        info.add_metric((*self._labels, str(self._block_size), str(stats.num_blocks)), 1)
        yield info
        if stats.max_loras:
            yield self._loras(stats)

    def _loras(self, stats: EngineStats) -> Metric:
        """Names are in labels, as in vLLM: routers such as the Gateway API inference extension read them there."""
        labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        family = GaugeMetricFamily(
            "vllm:lora_requests_info", "LoRA adapters with requests; the value is the time.", labels=labels
        )
        waiting, running = (",".join(sorted(names)) for names in (stats.waiting_adapters, stats.running_adapters))
        family.add_metric((str(stats.max_loras), waiting, running), time.time())
        return family

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        gauges = {
            "vllm:num_requests_running": ("Sequences in the batch.", stats.num_running),
            "vllm:num_requests_waiting": ("Sequences waiting for a slot in the batch.", stats.num_waiting),
            "vllm:kv_cache_usage_perc": ("Fraction of KV blocks in use, 0 to 1.", stats.kv_usage),
            "warmpath:num_free_blocks": ("KV blocks that no sequence holds.", stats.num_free_blocks),
            "warmpath:num_host_blocks": ("Capacity of the host tier in KV blocks.", stats.num_host_blocks),
            "warmpath:num_host_blocks_used": ("KV blocks stored in the host tier.", stats.num_host_blocks_used),
            "warmpath:integrity": (
                "1 if the last integrity check of the block pool passed, else 0.",
                int(stats.integrity_ok),
            ),
            "warmpath:engine_up": ("1 while the engine is healthy, else 0.", int(self._engine.healthy)),
        }
        for name, (documentation, value) in gauges.items():
            gauge = GaugeMetricFamily(name, documentation, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        yield self._split(
            GaugeMetricFamily,
            "vllm:num_requests_waiting_by_reason",
            "Waiting sequences by reason; the reason is always capacity.",
            "reason",
            {"capacity": stats.num_waiting, "deferred": 0},
        )

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        num_cached, num_accepted = stats.cached_prompt_tokens_total, sum(stats.accepted_tokens_total)
        counters = {
            "vllm:prompt_tokens": (
                "Prompt tokens processed, counted once for all choices of a prompt.",
                stats.prompt_tokens_total,
            ),
            "vllm:prompt_tokens_cached": ("Prompt tokens processed that were in the prefix cache.", num_cached),
            "vllm:generation_tokens": ("Output tokens generated.", stats.generation_tokens_total),
            "warmpath:unwanted_tokens": (
                "Output tokens generated after a stop string and then discarded.",
                stats.unwanted_tokens_total,
            ),
            "vllm:prefix_cache_queries": (
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_cache_queries_total,
            ),
            "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.prefix_cache_hits_total),
            "vllm:num_preemptions": (
                "Preemptions: sequences returned to the queue for recomputation.",
                stats.preemptions_total,
            ),
            "vllm:spec_decode_num_drafts": (
                "Drafts: times that tokens were drafted for a sequence.",
                stats.drafts_total,
            ),
            "vllm:spec_decode_num_draft_tokens": ("Draft tokens.", stats.draft_tokens_total),
            "vllm:spec_decode_num_accepted_tokens": ("Draft tokens accepted.", num_accepted),
            "warmpath:steps_given_up": (
                "Steps interrupted for requests of higher priority.",
                stats.steps_given_up_total,
            ),
            "warmpath:host_blocks_saved": ("KV blocks copied to the host tier.", stats.host_blocks_saved_total),
            "warmpath:host_blocks_restored": (
                "KV blocks restored from the host tier.",
                stats.host_blocks_restored_total,
            ),
            "warmpath:host_blocks_corrupted": (
                "KV blocks in the host tier whose checksum did not match.",
                stats.host_blocks_corrupted_total,
            ),
            "warmpath:integrity_checks": ("Integrity checks of the block pool.", stats.integrity_checks_total),
            "warmpath:requests_aborted": ("Sequences aborted before they finished.", stats.aborted_total),
        }
        for name, (documentation, value) in counters.items():
            counter = CounterMetricFamily(name, documentation, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        num_computed = stats.prompt_tokens_total - num_cached
        yield self._split(
            CounterMetricFamily,
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by source of their keys and values.",
            "source",
            {
                "local_compute": num_computed,
                "local_cache_hit": num_cached - stats.transferred_prompt_tokens_total,
                "external_kv_transfer": stats.transferred_prompt_tokens_total,
            },
        )

    def _split(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        documentation: str,
        label: str,
        values: dict[str, int],
    ) -> Metric:
        """Returns a metric with one series per value of an additional label."""
        family = kind(name, documentation, labels=(*LABELS, label))
        for value, count in values.items():
            family.add_metric((*self._labels, value), count)
        return family

    def _step_tokens(self, stats: EngineStats) -> Metric:
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens computed per step.", labels=LABELS)
        bounds = [*map(floatToGoString, STEP_TOKENS_BOUNDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(stats.steps_total), strict=True))
        family.add_metric(self._labels, buckets, stats.step_tokens_total)
        return family
