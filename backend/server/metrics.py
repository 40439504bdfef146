"""Prometheus metrics under vLLM's names, so that routers and dashboards made for vLLM work unchanged.

What the engine counts is read at scrape time (engine_metrics.py); what only the server knows (how a request ended for
its client, and when tokens reached it) is observed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from backend.engine.async_engine import AsyncEngine
from backend.server.engine_metrics import ENGINE, LABELS, EngineCollector
from backend.server.usage_records import TokenUsage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKEN_COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
CHOICES_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTIONS_BUCKETS = (1, 2, 3, 4, 5, 10, 20)

QUEUE_FULL = "max_num_queued_reqs"  # vLLM's word for the bound on those who wait

# The weight of the newest request in the running mean behind `retry-after`.
_NEWEST_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class CompletedRequest:
    """A request that was answered in full."""

    e2e_seconds: float
    phase_seconds: Mapping[str, float]  # of the stages that it reached, by span name
    usage: TokenUsage
    num_choices: int  # that were made of each prompt
    max_tokens: int  # for each of them; 0 where none are generated
    longest_choice: int  # in tokens
    later_tokens: int  # but for the first of each choice
    num_preemptions: int


class ServerMetrics:
    def __init__(self, engine: AsyncEngine, model_name: str, block_size: int) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine, model_name, block_size))
        self._model = model_name
        self.mean_request_seconds = 1.0

        def histogram(name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, documentation, LABELS, registry=self._registry, buckets=buckets)
            return made.labels(model_name, ENGINE)

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
        self._longest = histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of a request's longest choice.", TOKEN_COUNT_BUCKETS
        )
        self._computed = histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens that were not cached.", TOKEN_COUNT_BUCKETS
        )
        self._choices = histogram("vllm:request_params_n", "Choices asked for.", CHOICES_BUCKETS)
        self._max_tokens = histogram("vllm:request_params_max_tokens", "Tokens asked for at most.", TOKEN_COUNT_BUCKETS)
        self._preemptions = histogram(
            "vllm:request_num_preemptions", "Times that a request was put back to wait.", PREEMPTIONS_BUCKETS
        )
        self._success = Counter(
            "vllm:request_success", "Ended requests.", (*LABELS, "finished_reason"), registry=self._registry
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(model_name, ENGINE, reason)
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests that a full queue had no place for.",
            ("model_name", "reason"),
            registry=self._registry,
        ).labels(model_name, QUEUE_FULL)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def tokens(self, seconds: float, count: int) -> None:
        """`count` tokens arrived together, `seconds` after those before them."""
        for _ in range(count):
            self._itl.observe(seconds / count)

    def finished(self, reason: str) -> None:
        self._success.labels(self._model, ENGINE, reason).inc()

    def rejected(self) -> None:
        self._rejections.inc()

    def completed(self, request: CompletedRequest) -> None:
        usage, phase_seconds = request.usage, request.phase_seconds
        self._e2e.observe(request.e2e_seconds)
        self._prompt.observe(usage.prompt_tokens)
        self._computed.observe(usage.prompt_tokens - usage.cached_tokens)
        self._generation.observe(usage.completion_tokens)
        self._longest.observe(request.longest_choice)
        self._choices.observe(request.num_choices)
        self._preemptions.observe(request.num_preemptions)
        if request.max_tokens:
            self._max_tokens.observe(request.max_tokens)
        if "engine.prefill" in phase_seconds:
            self._inference.observe(phase_seconds["engine.prefill"] + phase_seconds.get("engine.decode", 0.0))
        self.mean_request_seconds += _NEWEST_WEIGHT * (request.e2e_seconds - self.mean_request_seconds)
        for phase, histogram in (
            ("engine.queue", self._queue),
            ("engine.prefill", self._prefill),
            ("engine.decode", self._decode),
        ):
            if phase in phase_seconds:
                histogram.observe(phase_seconds[phase])
        if request.later_tokens > 0 and "engine.decode" in phase_seconds:
            self._tpot.observe(phase_seconds["engine.decode"] / request.later_tokens)

    def render(self) -> bytes:
        return generate_latest(self._registry)
