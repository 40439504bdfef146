"""Prometheus metrics under vLLM's names, so that routers and dashboards made for vLLM work unchanged.

What the engine counts is read from `AsyncEngine.stats()` at scrape time; what only the server knows (how a request
ended for its client, and when tokens reached it) is observed here.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backend.engine.async_engine import AsyncEngine
from backend.server.records import Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKEN_COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

# The weight of the newest request in the running mean behind `retry-after`.
_NEWEST_WEIGHT = 0.1


class Metrics:
    def __init__(self, engine: AsyncEngine, model_name: str, block_size: int) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model_name, block_size))
        self._model = model_name
        self.mean_request_seconds = 1.0

        def histogram(name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, documentation, ("model_name",), registry=self._registry, buckets=buckets)
            return made.labels(model_name)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Between one token and the next.", TOKEN_BUCKETS)
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "A request's mean time per later token.", TOKEN_BUCKETS
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", REQUEST_BUCKETS)
        self._queue = histogram("vllm:request_queue_time_seconds", "From submission to first run.", REQUEST_BUCKETS)
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "From first run to first token.", REQUEST_BUCKETS
        )
        self._decode = histogram("vllm:request_decode_time_seconds", "From first to last token.", REQUEST_BUCKETS)
        self._inference = histogram(
            "vllm:request_inference_time_seconds", "From first run to last token.", REQUEST_BUCKETS
        )
        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKEN_COUNT_BUCKETS)
        self._generation = histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request.", TOKEN_COUNT_BUCKETS
        )
        self._success = Counter(
            "vllm:request_success", "Ended requests.", ("model_name", "finished_reason"), registry=self._registry
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(model_name, reason)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def tokens(self, seconds: float, count: int) -> None:
        """`count` tokens arrived together, `seconds` after those before them."""
        for _ in range(count):
            self._itl.observe(seconds / count)

    def finished(self, reason: str) -> None:
        self._success.labels(self._model, reason).inc()

    def completed(self, e2e_seconds: float, stage_seconds: dict[str, float], later_tokens: int, usage: Usage) -> None:
        """A request was answered in full. `stage_seconds` has the stages that it reached, by span name."""
        self._e2e.observe(e2e_seconds)
        self._prompt.observe(usage.prompt_tokens)
        self._generation.observe(usage.completion_tokens)
        if "engine.prefill" in stage_seconds:
            self._inference.observe(stage_seconds["engine.prefill"] + stage_seconds.get("engine.decode", 0.0))
        self.mean_request_seconds += _NEWEST_WEIGHT * (e2e_seconds - self.mean_request_seconds)
        for stage, histogram in (
            ("engine.queue", self._queue),
            ("engine.prefill", self._prefill),
            ("engine.decode", self._decode),
        ):
            if stage in stage_seconds:
                histogram.observe(stage_seconds[stage])
        if later_tokens > 0 and "engine.decode" in stage_seconds:
            self._tpot.observe(stage_seconds["engine.decode"] / later_tokens)

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, engine: AsyncEngine, model_name: str, block_size: int) -> None:
        self._engine = engine
        self._model = model_name
        self._block_size = block_size

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        num_accepted = sum(stats.accepted_tokens_total)
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
        counters = {
            "vllm:prompt_tokens": ("Prompt tokens taken in.", stats.prompt_tokens_total),
            "vllm:generation_tokens": ("Tokens generated.", stats.generation_tokens_total),
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
        for name, (documentation, value) in gauges.items():
            gauge = GaugeMetricFamily(name, documentation, labels=("model_name",))
            gauge.add_metric((self._model,), value)
            yield gauge
        for name, (documentation, value) in counters.items():
            counter = CounterMetricFamily(name, documentation, labels=("model_name",))
            counter.add_metric((self._model,), value)
            yield counter
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that came true, by their place among the drafts.",
            labels=("model_name", "position"),
        )
        for place, accepted in enumerate(stats.accepted_tokens_total):
            places.add_metric((self._model, str(place)), accepted)
        yield places
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "How the KV cache is cut.", labels=("model_name", "block_size", "num_gpu_blocks")
        )
        info.add_metric((self._model, str(self._block_size), str(stats.num_blocks)), 1)
        yield info
