"""What the engine counts, read from `AsyncEngine.stats()` whenever somebody asks, under vLLM's names and labels.

A figure that vLLM has, and that is always zero here, is told where its dashboards add it to others.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from backend.engine.async_engine import AsyncEngine
from backend.engine.counters import STEP_TOKENS_BOUNDS
from backend.engine.engine import EngineStats

LABELS = ("model_name", "engine")
ENGINE = "0"  # vLLM numbers its data-parallel ranks, and this is one of one


class EngineCollector(Collector):
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
            "Drafted tokens that came true, by their place among the drafts.",
            "position",
            {str(place): accepted for place, accepted in enumerate(stats.accepted_tokens_total)},
        )
        yield self._step_tokens(stats)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "How the KV cache is cut.", labels=(*LABELS, "block_size", "num_gpu_blocks")
        )
        info.add_metric((*self._labels, str(self._block_size), str(stats.num_blocks)), 1)
        yield info

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        gauges = {
            "vllm:num_requests_running": ("Requests in the batch.", stats.num_running),
            "vllm:num_requests_waiting": ("Requests that wait for a place in the batch.", stats.num_waiting),
            "vllm:kv_cache_usage_perc": ("Used share of the KV cache, 0 to 1.", stats.kv_usage),
            "warmpath:num_free_blocks": ("KV blocks that no request holds.", stats.num_free_blocks),
            "warmpath:num_host_blocks": ("KV blocks that the host tier has room for.", stats.num_host_blocks),
            "warmpath:num_host_blocks_used": ("KV blocks in the host tier.", stats.num_host_blocks_used),
            "warmpath:integrity": ("1 while the block pool's books balance.", int(stats.integrity_ok)),
            "warmpath:engine_up": ("1 while the engine runs.", int(self._engine.healthy)),
        }
        for name, (documentation, value) in gauges.items():
            gauge = GaugeMetricFamily(name, documentation, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        yield self._split(
            GaugeMetricFamily,
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait, by what they wait for. Here, it is always capacity.",
            "reason",
            {"capacity": stats.num_waiting, "deferred": 0},
        )

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        num_cached, num_accepted = stats.cached_prompt_tokens_total, sum(stats.accepted_tokens_total)
        counters = {
            "vllm:prompt_tokens": ("Prompt tokens taken in, once for all choices.", stats.prompt_tokens_total),
            "vllm:prompt_tokens_cached": ("Of these, found cached.", num_cached),
            "vllm:generation_tokens": ("Tokens generated.", stats.generation_tokens_total),
            "warmpath:unwanted_tokens": (
                "Of these, computed behind a stop string before that was found, and in no answer.",
                stats.unwanted_tokens_total,
            ),
            "vllm:prefix_cache_queries": ("Prompt tokens looked up.", stats.prefix_cache_queries_total),
            "vllm:prefix_cache_hits": ("Prompt tokens found cached.", stats.prefix_cache_hits_total),
            "vllm:num_preemptions": ("Requests put back to wait, to be recomputed.", stats.preemptions_total),
            "vllm:spec_decode_num_drafts": ("Times that tokens were drafted.", stats.drafts_total),
            "vllm:spec_decode_num_draft_tokens": ("Tokens drafted.", stats.draft_tokens_total),
            "vllm:spec_decode_num_accepted_tokens": ("Drafted tokens that came true.", num_accepted),
            "warmpath:steps_given_up": ("Steps left for more urgent work.", stats.steps_given_up_total),
            "warmpath:host_blocks_saved": ("KV blocks copied to the host tier.", stats.host_blocks_saved_total),
            "warmpath:host_blocks_restored": ("KV blocks that came back.", stats.host_blocks_restored_total),
            "warmpath:host_blocks_corrupted": ("Of them, with a wrong checksum.", stats.host_blocks_corrupted_total),
            "warmpath:integrity_checks": ("Times the block pool's books were balanced.", stats.integrity_checks_total),
            "warmpath:requests_aborted": ("Requests given up before their end.", stats.aborted_total),
        }
        for name, (documentation, value) in counters.items():
            counter = CounterMetricFamily(name, documentation, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        num_computed = stats.prompt_tokens_total - num_cached
        yield self._split(
            CounterMetricFamily,
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their keys and values came from.",
            "source",
            {"local_compute": num_computed, "local_cache_hit": num_cached, "external_kv_transfer": 0},
        )

    def _split(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        documentation: str,
        label: str,
        values: dict[str, int],
    ) -> Metric:
        """One series for each value of a further label."""
        family = kind(name, documentation, labels=(*LABELS, label))
        for value, count in values.items():
            family.add_metric((*self._labels, value), count)
        return family

    def _step_tokens(self, stats: EngineStats) -> Metric:
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens computed in a step.", labels=LABELS)
        bounds = [*map(floatToGoString, STEP_TOKENS_BOUNDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(stats.steps_total), strict=True))
        family.add_metric(self._labels, buckets, stats.step_tokens_total)
        return family
