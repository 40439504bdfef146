import asyncio
import itertools
import logging
from collections.abc import Sequence

import msgspec
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from gateway.core import supervision
from gateway.policy import Policy, Tenant
from gateway.telemetry import CallRecord, Telemetry
from gateway.telemetry import export as export_module
from gateway.telemetry.record import phases
from gateway.telemetry.spans import SpanBuilder
from gateway.types import Attempt, Operation, Outcome, Principal, Trace, Usage
from tests.gateway.telemetry.conftest import CANARY, TRACE, at, timings
from tests.otlp_collector import Collector, attributes


async def export(collector: Collector, *records: CallRecord) -> None:
    telemetry = Telemetry(collector.url, replica="gw-1")
    await telemetry.start()
    for record in records:
        telemetry.record(record)
    await telemetry.shutdown()


def children(spans: Sequence[Span], parent: Span) -> list[str]:
    return [span.name for span in spans if span.parent_span_id == parent.span_id]


def hexes(*ids: bytes) -> list[int]:
    return [int.from_bytes(one) for one in ids]


async def test_the_span_tree_with_ids_and_times(collector: Collector, record: CallRecord) -> None:
    await export(collector, record)

    server = collector.named("POST /v1/chat/completions")
    chat = collector.named("chat gpt-4o")
    assert sorted(children(collector.spans, server)) == sorted(
        ["authenticate", "canonicalise", "cache.lookup", "admit", "queue", "route", "chat gpt-4o", "settle"]
    )
    assert children(collector.spans, chat) == ["POST", "POST"]
    assert {span.trace_id for span in collector.spans} == {TRACE.trace_id.to_bytes(16)}
    assert hexes(server.span_id, server.parent_span_id) == [0x11, TRACE.parent_span_id]
    assert len({span.span_id for span in collector.spans}) == len(collector.spans) == 11
    assert (server.kind, chat.kind) == (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT)
    assert collector.named("queue").kind == Span.SPAN_KIND_INTERNAL

    refused, answered = (span for span in collector.spans if span.name == "POST")
    assert hexes(refused.span_id, answered.span_id) == [0xA1, 0xB1]  # as they were sent upstream
    assert (answered.start_time_unix_nano, answered.end_time_unix_nano) == (at(2000), at(50_000))
    assert (chat.start_time_unix_nano, chat.end_time_unix_nano) == (at(1200), at(50_000))
    assert [(event.name, event.time_unix_nano) for event in chat.events] == [("first_chunk", at(9010))]


async def test_a_prefill_is_a_span_with_its_deployment_and_tokens(collector: Collector, record: CallRecord) -> None:
    assert record.call is not None
    policy, roles = record.call.policy, {"a": "prefill", "b": "decode"}
    deployments = tuple(one.model_copy(update={"role": roles[one.name]}) for one in policy.deployments)
    policy = Policy.model_validate(policy.model_copy(update={"deployments": deployments}).model_dump(by_alias=True))
    usage = Usage(input_uncached=100, cache_read=20, output=1, exact=True)
    attempts = (
        Attempt("a", "prefilled", at(1200), at(1900), 0xA1, status=200, unbilled=usage),
        Attempt("b", "ok", at(2000), at(50_000), 0xB1, status=200, blocks_from="a"),
    )
    changed = msgspec.structs.replace(
        record, call=msgspec.structs.replace(record.call, policy=policy), attempts=attempts
    )
    await export(collector, changed)
    prefill, answer = collector.named("prefill"), collector.named("POST")
    assert prefill.parent_span_id == answer.parent_span_id == collector.named("chat gpt-4o").span_id
    noted = attributes(prefill)
    assert (noted["warmpath.deployment"], noted["gen_ai.usage.input_tokens"]) == ("a", 120)
    assert "error.type" not in noted and prefill.status.code == Status.STATUS_CODE_UNSET
    assert "http.request.resend_count" not in attributes(answer), "it is no retry"


def test_requests_that_differ_in_anything_share_no_part_of_their_spans(record: CallRecord) -> None:
    """The parts that requests have in common are kept by whatever these depend on."""

    def built(builder: SpanBuilder, each: CallRecord) -> list[Span]:
        spans = [Span.FromString(span) for span in builder.build(each, phases(each.timings, each.attempts))]
        for span in spans:
            span.span_id = span.parent_span_id = b""  # some are random
        return spans

    call, replace = record.call, msgspec.structs.replace
    assert call is not None
    other_tenant = Principal(Tenant(name="other"), "other")
    other_policy = call.policy.model_copy(update={"hash": "another"})
    answered = record.attempts[1]
    variants = [
        record,
        *[
            replace(record, **changes)
            for changes in (
                {"status": 500}, {"status": 429, "attempts": (), "deployment": None}, {"cache": "hit"}, {"call": None},
                {"outcome": Outcome.TIMEOUT}, {"outcome": None}, {"status": 503, "error_code": "busy"},
                {"deployment": "a"},
                {"finish_reasons": ("length",)}, {"principal": other_tenant}, {"principal": None}, {"method": "GET"},
                {"path": "/v1/completions"}, {"trace": replace(TRACE, parent_span_id=0)}, {"attempts": (answered,)},
                {"attempts": (replace(answered, outcome="cut"),)}, {"attempts": (replace(answered, status=201),)},
                {"attempts": (replace(answered, deployment="a"),)}, {"timings": timings(("authenticate", 5), ended=9)},
            )
        ],
        *[
            replace(record, call=replace(call, **changes))
            for changes in (
                {"operation": Operation.COMPLETION}, {"asked_model": "qwen3"}, {"stream": False}, {"class_rule": None},
                {"canonical_steps": ()}, {"class_name": "batch"}, {"policy": other_policy}, {"max_output_tokens": 1},
            )
        ],
    ]  # fmt: skip
    one_builder, seen = SpanBuilder("1", "gw"), list[list[Span]]()
    for each in [*variants, *variants]:
        seen.append(built(one_builder, each))
        assert seen[-1] == built(SpanBuilder("1", "gw"), each)
    assert all(one != other for one, other in itertools.combinations(seen[: len(variants)], 2))


async def test_phases_add_up_to_the_request_exactly(collector: Collector, record: CallRecord) -> None:
    await export(collector, record)
    server = collector.named("POST /v1/chat/completions")
    own = [span for span in collector.spans if span.parent_span_id == server.span_id]
    assert (server.start_time_unix_nano, server.end_time_unix_nano) == (at(0), at(50_400))
    assert sum(span.end_time_unix_nano - span.start_time_unix_nano for span in own) == 50_400_000


async def test_attributes_follow_the_conventions(
    collector: Collector, record: CallRecord, caplog: pytest.LogCaptureFixture
) -> None:
    await export(collector, record)
    assert not caplog.records  # every value could be encoded
    assert attributes(collector.named("chat gpt-4o")) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "gpt-4o",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "Qwen/Qwen3",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": 0.00781,
        "gen_ai.usage.input_tokens": 120,  # cached ones included
        "gen_ai.usage.output_tokens": 30,
        "gen_ai.usage.cache_read.input_tokens": 80,
        "gen_ai.usage.cache_creation.input_tokens": 0,
        "gen_ai.usage.cache_write.input_tokens": 0,
        "gen_ai.usage.reasoning.output_tokens": 10,
        "openai.request.service_tier": "flex",
        "warmpath.usage.exact": True,
    }
    refused, answered = (span for span in collector.spans if span.name == "POST")
    assert attributes(refused) == {
        "http.request.method": "POST",
        "server.address": "10.0.0.5",
        "server.port": 8000,
        "url.full": "http://10.0.0.5:8000/v1/chat/completions",
        "error.type": "connect_error",
        "warmpath.deployment": "a",
        "warmpath.prefix.predicted_cached_tokens": 96,
    }
    assert refused.status.code == Status.STATUS_CODE_ERROR
    assert attributes(answered) == {
        "http.request.method": "POST",
        "http.request.resend_count": 1,
        "http.response.status_code": 200,
        "server.address": "b.internal",
        "server.port": 443,
        "url.full": "https://b.internal:443/v1/chat/completions",
        "warmpath.deployment": "b",
        "warmpath.prefix.predicted_cached_tokens": 64,
    }
    assert answered.status.code == Status.STATUS_CODE_UNSET
    server = attributes(collector.named("POST /v1/chat/completions"))
    assert server["http.response.status_code"] == 200
    assert (server["warmpath.tenant"], server["warmpath.key_id"]) == ("dev", "dev")
    assert attributes(collector.named("route")) == {
        "warmpath.deployment": "b",
        "warmpath.route.reason": "prefix",
        "warmpath.prefix.predicted_cached_tokens": 64,
    }
    assert attributes(collector.named("queue")) == {"warmpath.class": "realtime"}
    assert attributes(collector.named("settle")) == {"warmpath.event_id": "01K0EVENT"}


async def test_the_service_and_the_client_s_tracestate_are_exported(collector: Collector, record: CallRecord) -> None:
    record.trace = msgspec.structs.replace(TRACE, tracestate="a=1,b=2")
    await export(collector, record)
    (resource,) = collector.requests[0].resource_spans
    names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert (names["service.name"], names["service.instance.id"]) == ("warmpath-gateway", "gw-1")
    assert {span.trace_state for span in collector.spans} == {"a=1,b=2"}


async def test_a_new_trace_has_a_root(collector: Collector, record: CallRecord) -> None:
    record.trace = Trace(trace_id=5, parent_span_id=0, sampled=True)
    await export(collector, record)
    assert collector.named("POST /v1/chat/completions").parent_span_id == b""


async def test_an_unsampled_request_has_no_spans(collector: Collector, record: CallRecord) -> None:
    record.trace = msgspec.structs.replace(TRACE, sampled=False)
    await export(collector, record)
    assert collector.requests == []


async def test_a_rejected_request_shows_the_phase_that_rejected_it(collector: Collector, record: CallRecord) -> None:
    record.timings = timings(("authenticate", 1), ("canonicalise", 10), ("admit", 20), ("settle", 30), ended=40)
    record.status, record.error_code, record.outcome = 429, "rate_limit_exceeded", None
    record.attempts, record.usage, record.deployment = (), None, None
    await export(collector, record)
    assert not [span for span in collector.spans if span.kind == Span.SPAN_KIND_CLIENT]
    assert attributes(collector.named("admit"))["error.type"] == "rate_limit_exceeded"
    assert "error.type" not in attributes(collector.named("settle"))
    server = collector.named("POST /v1/chat/completions")
    assert attributes(server)["error.type"] == "rate_limit_exceeded"
    assert server.status.code == Status.STATUS_CODE_UNSET  # a 4xx is the client's error


async def test_an_error_without_a_code_is_named_by_its_status(collector: Collector, record: CallRecord) -> None:
    record.timings = timings(("authenticate", 1), ("canonicalise", 10), ended=40)
    record.status, record.outcome, record.attempts, record.call = 400, None, (), None
    await export(collector, record)
    assert attributes(collector.named("canonicalise")) == {"error.type": "400"}


async def test_a_request_without_a_valid_key_has_a_span(collector: Collector) -> None:
    await export(
        collector,
        CallRecord(
            call_id="call-1", trace=TRACE, server_span_id=9, timings=timings(("authenticate", 1), ended=3),
            method="POST", path="/v1/embeddings", status=401, error_code="invalid_api_key",
        ),
    )  # fmt: skip
    assert [span.name for span in collector.spans] == ["POST /v1/embeddings", "authenticate"]


async def test_a_broken_reply_is_an_error_whatever_its_status(collector: Collector, record: CallRecord) -> None:
    record.outcome, record.error_code = Outcome.UPSTREAM_CUT, "upstream_cut"
    record.attempts = (Attempt("b", "cut", at(2000), at(50_000), 0xB1, status=200),)
    await export(collector, record)
    for name in ("POST /v1/chat/completions", "chat gpt-4o"):
        span = collector.named(name)
        assert span.status.code == Status.STATUS_CODE_ERROR
        assert attributes(span)["error.type"] == "upstream_cut"
    assert attributes(collector.named("POST"))["error.type"] == "cut"


async def test_a_client_that_disconnected_is_not_an_error(collector: Collector, record: CallRecord) -> None:
    record.outcome = Outcome.CLIENT_GONE
    record.attempts = (Attempt("b", "client_gone", at(2000), at(50_000), 0xB1, status=200),)
    await export(collector, record)
    assert all(span.status.code == Status.STATUS_CODE_UNSET for span in collector.spans)


async def test_a_replayed_answer_has_no_upstream_spans(collector: Collector, record: CallRecord) -> None:
    record.cache, record.attempts, record.deployment = "hit", (), None
    await export(collector, record)
    assert attributes(collector.named("replay")) == {"warmpath.cache": "hit"}
    assert not [span for span in collector.spans if span.kind == Span.SPAN_KIND_CLIENT]


async def test_no_private_data_is_exported(collector: Collector, record: CallRecord) -> None:
    await export(collector, record)
    sent = b"".join(collector.bodies)
    assert b"gpt-4o" in sent
    assert CANARY.encode() not in sent
    assert b"user:pw" not in sent


async def test_spans_that_the_collector_rejects_are_counted(
    collector: Collector, record: CallRecord, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 400
    telemetry = Telemetry(collector.url)
    await telemetry.start()
    with caplog.at_level(logging.CRITICAL, "opentelemetry"):
        telemetry.record(record)
        await telemetry.shutdown()
    assert b"warmpath_spans_dropped_total 11.0" in telemetry.render_metrics()[0]


async def test_a_batch_is_retried_once_if_the_collector_is_overloaded(
    collector: Collector, record: CallRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "RETRY_SECONDS", 0.0)
    collector.first_statuses = [503]
    telemetry = Telemetry(collector.url, otlp_headers=[("api-key", "secret")])
    await telemetry.start()
    telemetry.record(record)
    await telemetry.shutdown()
    assert [len(request.resource_spans) for request in collector.requests] == [1, 1]
    assert collector.bodies[0] == collector.bodies[1]
    assert [headers["api-key"] for headers in collector.headers] == ["secret", "secret"]
    assert b"warmpath_spans_dropped_total 0.0" in telemetry.render_metrics()[0]


async def test_spans_are_sent_in_batches(
    collector: Collector, record: CallRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "SPANS_PER_EXPORT_MAX", 20)
    telemetry = Telemetry(collector.url, export_interval_seconds=3600)
    await telemetry.start()
    for _ in range(5):
        telemetry.record(record)
    await telemetry.shutdown()
    assert len(collector.spans) == 55
    assert len(collector.requests) == 3


async def test_a_full_queue_drops_whole_requests_and_counts_them(
    collector: Collector, record: CallRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "SPANS_WAITING_MAX", 25)
    monkeypatch.setattr(export_module, "SPANS_PER_EXPORT_MAX", 25)
    telemetry = Telemetry(collector.url, export_interval_seconds=3600)
    await telemetry.start()
    for _ in range(4):
        telemetry.record(record)
    assert b"warmpath_spans_dropped_total 22.0" in telemetry.render_metrics()[0]
    await telemetry.shutdown()
    assert len(collector.spans) == 22


async def test_a_failing_export_loses_its_own_spans_only(
    collector: Collector, record: CallRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_SECONDS", 0.001)
    telemetry = Telemetry(collector.url, export_interval_seconds=0.001)
    assert telemetry._spans is not None
    envelope, failed = telemetry._spans._envelope, asyncio.Event()

    def failing_once(batch: Sequence[bytes]) -> bytes:
        if not failed.is_set():
            failed.set()
            raise ZeroDivisionError
        return envelope(batch)

    telemetry._spans._envelope = failing_once
    await telemetry.start()
    telemetry.record(record)
    await asyncio.wait_for(failed.wait(), 10)
    await asyncio.sleep(0)
    telemetry.record(record)
    await telemetry.shutdown()
    assert len(collector.requests) == 1
    assert b"warmpath_spans_dropped_total 11.0" in telemetry.render_metrics()[0]


async def test_spans_not_sent_by_the_end_of_the_flush_are_dropped(
    collector: Collector, record: CallRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "FLUSH_TIMEOUT_SECONDS", 0.0)
    telemetry = Telemetry(collector.url)
    await telemetry.start()
    telemetry.record(record)
    await telemetry.shutdown()
    assert collector.requests == []
    assert b"warmpath_spans_dropped_total 11.0" in telemetry.render_metrics()[0]


async def test_without_a_collector_nothing_is_sent(record: CallRecord) -> None:
    telemetry = Telemetry()
    await telemetry.start()
    telemetry.record(record)
    await telemetry.shutdown()
    await telemetry.shutdown()
    assert b"warmpath_spans_dropped_total 0.0" in telemetry.render_metrics()[0]
