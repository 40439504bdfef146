"""Prometheus metrics under vLLM's names, so that routers and dashboards made for vLLM work unchanged.

`engine_metrics.py` exports the engine's own counters at each scrape. `ServerMetrics` observes what only the server
knows: latencies as a client sees them, and how requests end. `_REQUEST_HISTOGRAMS` declares what it observes once per
completed request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from backend.engine.async_engine import AsyncEngine
from backend.server.engine_metrics import ENGINE, LABELS, EngineCollector
from backend.server.token_latency import TokenLatencies
from backend.server.usage_records import TokenUsage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKEN_COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
CHOICES_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTIONS_BUCKETS = (1, 2, 3, 4, 5, 10, 20)

QUEUE_FULL = "max_num_queued_reqs"  # vLLM's label value for the limit of the waiting queue

# Weight of the newest request in the exponential moving average that `retry-after` is computed from.
_NEWEST_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class CompletedRequest:
    """Durations, token usage and limits of a request that completed without an error."""

    e2e_seconds: float
    phase_seconds: Mapping[str, float]  # durations of the phases that the request reached, by span name
    usage: TokenUsage
    num_choices: int  # generated per prompt
    max_tokens: int  # per choice; 0 for embeddings
    longest_choice: int  # in tokens
    later_tokens: int  # output tokens except the first token of each choice
    num_preemptions: int


def _phase_seconds(phase: str) -> Callable[[CompletedRequest], float | None]:
    return lambda request: request.phase_seconds.get(phase)


def _inference_seconds(request: CompletedRequest) -> float | None:
    prefill = request.phase_seconds.get("engine.prefill")
    return None if prefill is None else prefill + request.phase_seconds.get("engine.decode", 0.0)


def _seconds_per_later_token(request: CompletedRequest) -> float | None:
    decode = request.phase_seconds.get("engine.decode")
    return None if decode is None or request.later_tokens <= 0 else decode / request.later_tokens


@dataclass(frozen=True, slots=True)
class _RequestHistogram:
    """A histogram of completed requests. `value` returns None for a request that does not count."""

    name: str
    documentation: str
    buckets: tuple[float, ...]
    value: Callable[[CompletedRequest], float | None]


_REQUEST_HISTOGRAMS = (
    _RequestHistogram(
        "vllm:request_time_per_output_token_seconds",
        "Mean time per output token of a request, without its first token.",
        TOKEN_BUCKETS,
        _seconds_per_later_token,
    ),
    _RequestHistogram(
        "vllm:e2e_request_latency_seconds",
        "Time from arrival to the end of the response.",
        REQUEST_BUCKETS,
        lambda request: request.e2e_seconds,
    ),
    _RequestHistogram(
        "vllm:request_queue_time_seconds",
        "Time from submission to the engine until first scheduled.",
        REQUEST_BUCKETS,
        _phase_seconds("engine.queue"),
    ),
    _RequestHistogram(
        "vllm:request_prefill_time_seconds",
        "Time from first scheduled to the first token.",
        REQUEST_BUCKETS,
        _phase_seconds("engine.prefill"),
    ),
    _RequestHistogram(
        "vllm:request_decode_time_seconds",
        "Time from the first to the last token.",
        REQUEST_BUCKETS,
        _phase_seconds("engine.decode"),
    ),
    _RequestHistogram(
        "vllm:request_inference_time_seconds",
        "Time from first scheduled to the last token.",
        REQUEST_BUCKETS,
        _inference_seconds,
    ),
    _RequestHistogram(
        "vllm:request_prompt_tokens",
        "Prompt tokens of a request.",
        TOKEN_COUNT_BUCKETS,
        lambda request: request.usage.prompt_tokens,
    ),
    _RequestHistogram(
        "vllm:request_generation_tokens",
        "Output tokens of a request.",
        TOKEN_COUNT_BUCKETS,
        lambda request: request.usage.completion_tokens,
    ),
    _RequestHistogram(
        "vllm:request_max_num_generation_tokens",
        "Output tokens of a request's longest choice.",
        TOKEN_COUNT_BUCKETS,
        lambda request: request.longest_choice,
    ),
    _RequestHistogram(
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens of a request that were not in the prefix cache.",
        TOKEN_COUNT_BUCKETS,
        lambda request: request.usage.prompt_tokens - request.usage.cached_tokens,
    ),
    _RequestHistogram(
        "vllm:request_params_n",
        "Requested choices per prompt (`n`).",
        CHOICES_BUCKETS,
        lambda request: request.num_choices,
    ),
    _RequestHistogram(
        "vllm:request_params_max_tokens",
        "Requested maximum of output tokens.",
        TOKEN_COUNT_BUCKETS,
        lambda request: request.max_tokens or None,
    ),
    _RequestHistogram(
        "vllm:request_num_preemptions",
        "Preemptions of a request.",
        PREEMPTIONS_BUCKETS,
        lambda request: request.num_preemptions,
    ),
)


class ServerMetrics:
    """Prometheus registry of one server process. Use it on the event loop only.

    `mean_request_seconds` is a moving average of request durations. `retry-after` is computed from it.
    """

    def __init__(self, engine: AsyncEngine, model_name: str, block_size: int) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine, model_name, block_size))
        self._model = model_name
        self.mean_request_seconds = 1.0
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Time from arrival to the first token.", TTFT_BUCKETS
        )
        self._itl = TokenLatencies(
            "vllm:inter_token_latency_seconds",
            "Time between consecutive tokens.",
            dict(zip(LABELS, (model_name, ENGINE), strict=True)),
            TOKEN_BUCKETS,
        )
        self.registry.register(self._itl)
        self._of_requests = [
            (self._histogram(each.name, each.documentation, each.buckets), each.value) for each in _REQUEST_HISTOGRAMS
        ]
        self._success = Counter(
            "vllm:request_success",
            "Finished sequences by finish reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        # Creates the series at zero, so that the first increment shows in rates.
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(model_name, ENGINE, reason)
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests rejected because the queue was full.",
            ("model_name", "reason"),
            registry=self.registry,
        ).labels(model_name, QUEUE_FULL)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, documentation, LABELS, registry=self.registry, buckets=buckets)
        return histogram.labels(self._model, ENGINE)

    def observe_first_token(self, seconds: float) -> None:
        """Observes the time to first token of one choice."""
        self._ttft.observe(seconds)

    def observe_tokens(self, seconds: float, count: int) -> None:
        """Observes `count` tokens that arrived together, `seconds` after the previous ones."""
        self._itl.observe(seconds, count)

    def count_finished(self, reason: str) -> None:
        """Counts a finished sequence under its finish reason."""
        self._success.labels(self._model, ENGINE, reason).inc()

    def count_rejection(self) -> None:
        """Counts a request that was rejected because the queue was full."""
        self._rejections.inc()

    def observe_request(self, request: CompletedRequest) -> None:
        """Observes a completed request and updates `mean_request_seconds`."""
        for histogram, value_of in self._of_requests:
            value = value_of(request)
            if value is not None:
                histogram.observe(value)
        self.mean_request_seconds += _NEWEST_WEIGHT * (request.e2e_seconds - self.mean_request_seconds)

    def render(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
