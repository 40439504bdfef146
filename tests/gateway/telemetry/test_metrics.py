import logging
from typing import Any

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from gateway.core.kv_transfer import PREFILLED
from gateway.policy import Policy
from gateway.telemetry import CallRecord, Telemetry, aggregates
from gateway.telemetry.metrics import UNSORTED_MAX
from gateway.telemetry.observable import LEDGER_ROWS, QUEUE_DEPTH, ObservableMetric
from gateway.types import Attempt, Outcome, Usage
from tests.gateway.telemetry.conftest import CANARY, TRACE, at, timings
from tests.otlp_collector import Collector


def samples(telemetry: Telemetry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    content, content_type = telemetry.render_metrics()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(content.decode())
        for sample in family.samples
    }


def value(telemetry: Telemetry, name: str, **labels: str) -> float | None:
    renamed = {"class" if key == "class_" else key: text for key, text in labels.items()}
    return samples(telemetry).get((name, frozenset(renamed.items())))


def test_a_request_is_counted_once_with_its_tokens_and_times(record: CallRecord) -> None:
    telemetry = Telemetry()
    telemetry.record(record)

    def read(name: str, **labels: str) -> float | None:
        return value(telemetry, name, **labels)

    call = {"operation": "chat/completions", "model": "qwen3", "class_": "realtime"}
    assert read("warmpath_requests_total", **call, status="200", outcome="complete") == 1
    assert read("warmpath_request_duration_seconds_sum", **call) == pytest.approx(0.0504)
    assert read("warmpath_time_to_first_token_seconds_sum", **call) == pytest.approx(0.00901)
    assert read("warmpath_time_to_first_token_seconds_bucket", **call, le="0.01") == 1
    assert read("warmpath_queue_wait_seconds_sum", class_="realtime") == pytest.approx(0.001)
    # All phases except the queue (1000 us) and the chat (48 800 us).
    assert read("warmpath_overhead_seconds_sum", operation="chat/completions") == pytest.approx(0.0006)
    tokens = {"input_uncached": 40, "cache_read": 80, "cache_write": 0, "output": 30, "reasoning": 10}
    assert {kind: read("warmpath_tokens_total", model="qwen3", kind=kind) for kind in tokens} == tokens
    assert read("warmpath_upstream_attempts_total", deployment="a", outcome="connect_error") == 1
    assert read("warmpath_upstream_attempts_total", deployment="b", outcome="ok") == 1
    assert read("warmpath_cache_total", result="miss") == 1
    assert read("warmpath_prefix_predicted_tokens_total", deployment="b") == 64
    assert read("warmpath_prefix_reported_tokens_total", deployment="b") == 80
    gen_ai = {
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": "vllm",
        "gen_ai_request_model": "qwen3",
    }
    assert read("gen_ai_client_operation_duration_seconds_sum", **gen_ai, error_type="") == pytest.approx(0.0488)
    assert read("gen_ai_client_token_usage_sum", **gen_ai, gen_ai_token_type="input") == 120


def test_a_prefill_for_another_deployment_is_counted_where_it_was_computed(record: CallRecord) -> None:
    telemetry = Telemetry()
    first, answer = record.attempts
    computed = Usage(input_uncached=90, cache_read=30, output=1, exact=True)
    prefill = msgspec.structs.replace(
        first, outcome=PREFILLED, unbilled=computed, ended_ns=first.started_ns + 250_000_000
    )
    record.attempts = [prefill, answer]
    telemetry.record(record)
    tokens = {kind: value(telemetry, "warmpath_prefill_tokens_total", deployment="a", kind=kind)
              for kind in ("computed", "cached")}  # fmt: skip
    assert tokens == {"computed": 90, "cached": 30}
    assert value(telemetry, "warmpath_prefill_seconds_sum", deployment="a") == pytest.approx(0.25)
    assert value(telemetry, "warmpath_prefill_seconds_count", deployment="a") == 1
    assert not value(telemetry, "warmpath_prefix_reported_tokens_total", deployment="b"), "not its own cache alone"


def test_observed_values_are_sorted_into_buckets_periodically_and_none_is_lost(record: CallRecord) -> None:
    telemetry, requests = Telemetry(), 2 * UNSORTED_MAX + 1
    for _ in range(requests):
        telemetry.record(record)
    call = {"operation": "chat/completions", "model": "qwen3", "class_": "realtime"}
    series = telemetry._metrics._duration.labels("chat/completions", "qwen3", "realtime")
    assert sum(series.counts) >= 2 * UNSORTED_MAX - 1, "sorted before any scrape"
    assert value(telemetry, "warmpath_request_duration_seconds_count", **call) == requests
    assert value(telemetry, "warmpath_request_duration_seconds_sum", **call) == pytest.approx(0.0504 * requests)


def test_a_request_rejected_by_authentication_has_no_model() -> None:
    telemetry = Telemetry()
    telemetry.record(
        CallRecord(
            call_id="call-1", trace=TRACE, server_span_id=1, timings=timings(("authenticate", 1), ended=3),
            method="POST", path="/v1/chat/completions", status=401, error_code="invalid_api_key",
        )
    )  # fmt: skip
    labels = {"operation": "other", "model": "other", "class_": "other", "status": "401", "outcome": "rejected"}
    assert value(telemetry, "warmpath_requests_total", **labels) == 1
    assert not [name for name, _ in samples(telemetry) if name.startswith(("warmpath_cache", "gen_ai"))]


def test_an_answer_from_the_cache_costs_no_upstream_tokens(record: CallRecord) -> None:
    telemetry = Telemetry()
    record.cache, record.attempts, record.deployment = "hit", (), None
    telemetry.record(record)
    assert value(telemetry, "warmpath_cache_total", result="hit") == 1
    assert not [name for name, _ in samples(telemetry) if name.startswith(("warmpath_tokens_total", "gen_ai"))]


def test_an_estimate_is_not_compared_with_the_prediction(record: CallRecord) -> None:
    telemetry = Telemetry()
    assert record.usage is not None
    record.usage = type(record.usage)(input_uncached=120, output=3, exact=False)
    record.outcome = Outcome.CLIENT_GONE
    telemetry.record(record)
    assert value(telemetry, "warmpath_tokens_total", model="qwen3", kind="input_uncached") == 120
    assert value(telemetry, "warmpath_prefix_predicted_tokens_total", deployment="b") == 0


def test_rare_upstream_statuses_are_counted_by_class(record: CallRecord) -> None:
    telemetry = Telemetry()
    record.attempts = [Attempt("a", f"status_{s}", at(1), at(2), 1, status=s) for s in (429, 503, 507, 599, 418)]
    telemetry.record(record)
    for outcome, count in {"status_429": 1, "status_503": 1, "status_5xx": 2, "status_4xx": 1}.items():
        assert value(telemetry, "warmpath_upstream_attempts_total", deployment="a", outcome=outcome) == count


def test_the_number_of_label_values_is_bounded(record: CallRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregates, "SERIES_MAX", 10)
    telemetry = Telemetry()
    record.attempts = [Attempt(f"d{i}", "ok", at(1), at(2), 1) for i in range(30)]
    telemetry.record(record)
    telemetry.record(record)
    counted = {
        dict(labels)["deployment"]: n
        for (name, labels), n in samples(telemetry).items()
        if name == "warmpath_upstream_attempts_total"
    }
    assert counted == {**{f"d{i}": 2.0 for i in range(10)}, "other": 40.0}


def test_observable_metrics_are_read_at_each_scrape() -> None:
    telemetry = Telemetry()
    depth: dict[tuple[str, ...], float] = {("realtime",): 2, ("batch",): 7}
    rows = 0
    telemetry.register(QUEUE_DEPTH, lambda: depth)
    telemetry.register(LEDGER_ROWS, lambda: rows)
    rows, depth["batch",] = 5, 8
    assert value(telemetry, "warmpath_queue_depth", class_="batch") == 8
    assert value(telemetry, "warmpath_ledger_rows_total") == 5
    with pytest.raises(ValueError, match="warmpath_queue_depth"):
        telemetry.register(QUEUE_DEPTH, lambda: depth)


def test_the_hash_of_the_policy_in_force_is_shown(policy: Policy) -> None:
    telemetry = Telemetry()
    telemetry.policy_loaded(policy)
    changed = policy.model_copy(update={"default_class": "batch"})
    telemetry.policy_loaded(Policy.model_validate(changed.model_dump(by_alias=True)))
    telemetry.policy_rejected()
    hashes = [dict(labels)["hash"] for name, labels in samples(telemetry) if name == "warmpath_policy_info"]
    assert len(hashes) == 1
    assert hashes != [policy.hash]
    assert value(telemetry, "warmpath_policy_reloads_total", result="ok") == 2
    assert value(telemetry, "warmpath_policy_reloads_total", result="rejected") == 1


def test_no_label_contains_private_data(record: CallRecord) -> None:
    telemetry = Telemetry()
    telemetry.record(record)
    assert CANARY.encode() not in telemetry.render_metrics()[0]


def test_an_error_in_telemetry_is_counted_and_logged_and_not_raised(
    record: CallRecord, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = Telemetry()
    broken: Any = None
    record.timings = broken
    with caplog.at_level(logging.ERROR, "gateway.telemetry"):
        telemetry.record(record)
    assert value(telemetry, "warmpath_telemetry_failures_total") == 1
    assert caplog.records[0].__dict__["call_id"] == "call-1"


def test_each_instance_has_its_own_metrics(record: CallRecord) -> None:
    one, other = Telemetry(), Telemetry()
    one.record(record)
    one.register(ObservableMetric("extra", "Extra."), lambda: 1.0)
    assert value(one, "extra") == 1
    assert value(other, "extra") is None
    assert value(other, "warmpath_cache_total", result="miss") is None


def test_cost_is_counted_by_tenant_and_by_deployment(record: CallRecord) -> None:
    telemetry = Telemetry()
    record.cost, record.currency = 25 * 10**13, "USD"  # 0.25
    telemetry.record(record)
    by_tenant = {"tenant": "dev", "class_": "realtime"}
    assert value(telemetry, "warmpath_tenant_cost_total", **by_tenant, currency="USD") == 0.25
    assert value(telemetry, "warmpath_tenant_requests_total", **by_tenant) == 1
    assert value(telemetry, "warmpath_tenant_tokens_total", **by_tenant, kind="cache_read") == 80
    labels = {"model": "qwen3", "class_": "realtime", "deployment": "b", "currency": "USD"}
    assert value(telemetry, "warmpath_cost_total", **labels) == pytest.approx(0.25)
    assert not [name for name, _ in samples(telemetry) if name == "warmpath_unpriced_calls_total"]


def test_a_call_without_a_known_price_is_counted(record: CallRecord) -> None:
    telemetry = Telemetry()
    telemetry.record(record)
    assert value(telemetry, "warmpath_unpriced_calls_total", model="qwen3") == 1


async def test_a_traced_request_is_an_exemplar_in_openmetrics(record: CallRecord, collector: Collector) -> None:
    telemetry = Telemetry(collector.url)
    await telemetry.start()
    telemetry.record(record)
    content, content_type = telemetry.render_metrics("application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    await telemetry.shutdown()
    assert content_type.startswith("application/openmetrics-text")
    found = {
        sample.name: (sample.labels["le"], sample.exemplar.labels["trace_id"])
        for family in openmetrics_families(content.decode())
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert found == {
        "warmpath_request_duration_seconds_bucket": ("0.1", f"{TRACE.trace_id:032x}"),
        "warmpath_time_to_first_token_seconds_bucket": ("0.01", f"{TRACE.trace_id:032x}"),
    }
    assert b" # {" not in telemetry.render_metrics()[0], "the older format has no exemplars"
