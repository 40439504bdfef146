"""Declares the metrics that requests update: name, help text, label names and buckets. `metrics.py` updates them.

Metric and label names are an interface: dashboards and alerts of users contain them. Label names stand in one text,
separated by spaces. Metrics that are read at a scrape are declared in `observable.py`.
"""

from __future__ import annotations

import msgspec

DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 600)
WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 600, 3600)
OVERHEAD_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1)
GEN_AI_DURATION_BUCKETS = tuple(0.01 * 2**i for i in range(14))  # from the GenAI conventions: 0.01 ... 81.92
GEN_AI_TOKEN_BUCKETS = tuple(4**i for i in range(14))  # from the GenAI conventions: 1 ... 67108864


class CounterDeclaration(msgspec.Struct, frozen=True):
    """A counter's name, help text and label names."""

    name: str
    help: str
    labels: str


class HistogramDeclaration(msgspec.Struct, frozen=True):
    """A histogram's name, help text, label names, and upper bounds of its buckets."""

    name: str
    help: str
    labels: str
    buckets: tuple[float, ...]


REQUESTS = CounterDeclaration(
    "warmpath_requests",
    "Requests by outcome. Outcome rejected: the gateway rejected the request, which was sent to no upstream.",
    "operation model class status outcome",
)
DURATION = HistogramDeclaration(
    "warmpath_request_duration_seconds",
    "Time from the request's arrival to the end of its reply.",
    "operation model class",
    DURATION_BUCKETS,
)
TTFT = HistogramDeclaration(
    "warmpath_time_to_first_token_seconds",
    "Time from the request's arrival to the first chunk of its answer.",
    "operation model class",
    DURATION_BUCKETS,
)
QUEUE_WAIT = HistogramDeclaration("warmpath_queue_wait_seconds", "Time in the queue.", "class", WAIT_BUCKETS)
OVERHEAD = HistogramDeclaration(
    "warmpath_overhead_seconds",
    "Time spent in the gateway: all phases except the queue and the upstream. Includes reading the body.",
    "operation",
    OVERHEAD_BUCKETS,
)
TOKENS = CounterDeclaration(
    "warmpath_tokens",
    "Tokens processed by upstreams. reasoning is part of output. For bills, use the ledger.",
    "model kind",
)
COST = CounterDeclaration(
    "warmpath_cost",
    "Cost of calls, in units of the currency. Without a deployment: answers from the cache. For bills, use the ledger.",
    "model class deployment currency",
)
UNPRICED = CounterDeclaration("warmpath_unpriced_calls", "Billed calls without a known price.", "model")
ATTEMPTS = CounterDeclaration("warmpath_upstream_attempts", "Attempts on deployments by outcome.", "deployment outcome")
BLOCK_LOADS = CounterDeclaration(
    "warmpath_block_loads",
    "Attempts that were to load the beginning of their prompt from another deployment, the source.",
    "deployment source",
)
PREFILL_TOKENS = CounterDeclaration(
    "warmpath_prefill_tokens",
    "Prompt tokens of calls that a prefill deployment computed for another one. kind: computed or cached there.",
    "deployment kind",
)
PREFILL_SECONDS = HistogramDeclaration(
    "warmpath_prefill_seconds", "Duration of prefills for other deployments.", "deployment", DURATION_BUCKETS
)
LOST_TOKENS = CounterDeclaration(
    "warmpath_hedge_lost_tokens",
    "Tokens of cancelled hedge attempts, which are not billed. Counted by the deployments' own records. If "
    "there was none in time, the whole prompt is counted (exact: false).",
    "deployment kind exact",
)
CACHE = CounterDeclaration("warmpath_cache", "Calls by the result of the response cache lookup.", "result")
PREFIX_PREDICTED = CounterDeclaration(
    "warmpath_prefix_predicted_tokens",
    "Cached tokens that the router predicted, for calls whose engine reported the actual number.",
    "deployment",
)
PREFIX_REPORTED = CounterDeclaration(
    "warmpath_prefix_reported_tokens", "Cached tokens that engines reported.", "deployment"
)
GEN_AI_DURATION = HistogramDeclaration(
    "gen_ai_client_operation_duration_seconds",
    "Time from the first attempt to the end of the answer (OpenTelemetry GenAI conventions).",
    "gen_ai_operation_name gen_ai_provider_name gen_ai_request_model error_type",
    GEN_AI_DURATION_BUCKETS,
)
GEN_AI_TOKENS = HistogramDeclaration(
    "gen_ai_client_token_usage",
    "Tokens per call. input includes cached tokens (OpenTelemetry GenAI conventions).",
    "gen_ai_operation_name gen_ai_provider_name gen_ai_request_model gen_ai_token_type",
    GEN_AI_TOKEN_BUCKETS,
)
RELOADS = CounterDeclaration("warmpath_policy_reloads", "Reloads of the policy by result.", "result")
