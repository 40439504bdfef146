"""CPU cost of telemetry per request: microseconds on the event loop's thread, by the share of sampled requests.

    python benchmarks/telemetry.py [--requests 20000]

Each request goes through all eight phases and one attempt. `begin` and `outgoing` run while the request is processed,
`record` after its reply, including building and encoding the spans.
"""

from __future__ import annotations

import argparse
import platform
import time

import msgspec

from gateway.policy import Policy
from gateway.telemetry import CallRecord, Telemetry
from gateway.types import Attempt, Call, Operation, Outcome, PhaseTimings, Principal, Trace, Usage

PHASES = ("authenticate", "canonicalise", "cache.lookup", "admit", "queue", "route", "chat", "settle")
UNUSED_URL = "http://127.0.0.1:9"


class PrefixRoute:
    """A stand-in for the router's choice."""

    reason = "prefix"


def make_call(policy: Policy, trace: Trace) -> Call:
    return Call(
        id="call", operation=Operation.CHAT, principal=Principal(policy.tenants[0], "dev"), policy=policy,
        asked_model="m", model=policy.models[0], class_name="realtime", latency_class=policy.classes["realtime"],
        stream=True, include_usage=True, max_output_tokens=64, deterministic=False,
        fields={"temperature": msgspec.Raw(b"0.7")}, fingerprint=(), prompt_tokens_estimate=100, cache_salt="",
        service_tier=None, end_user=None, canonical_steps=(), class_rule=None, deadline=0.0, trace=trace,
    )  # fmt: skip


def make_record(telemetry: Telemetry, call: Call, trace: Trace) -> CallRecord:
    timings = PhaseTimings()
    for phase in PHASES:
        timings.enter(phase)
    timings.first_chunk_ns = time.time_ns()
    timings.end()
    now = timings.phases[-2][1]
    return CallRecord(
        call_id=call.id, trace=trace, server_span_id=telemetry.new_span_id(), timings=timings, method="POST",
        path="/v1/chat/completions", status=200, operation=Operation.CHAT, principal=call.principal, call=call,
        outcome=Outcome.COMPLETE, cache="miss", route_choice=PrefixRoute(),
        attempts=(Attempt("a", "ok", now, now, telemetry.new_span_id(), 200),), deployment="a",
        usage=Usage(input_uncached=20, cache_read=80, output=30, exact=True), event_id="e",
    )  # fmt: skip


def micros(seconds: float, times: int) -> float:
    return seconds / times * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    requests = parser.parse_args().requests
    policy = Policy.model_validate(
        {
            "deployments": [{"name": "a", "base_url": "http://127.0.0.1:8000/v1", "model": "m"}],
            "models": [{"name": "m", "deployments": ["a"]}],
            "tenants": [{"name": "dev"}],
        }
    )
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {requests} requests")
    print(f"{'sampled':>8} {'begin + outgoing':>17} {'record':>8}   us per request")
    for sample in (0.0, 0.1, 1.0):
        telemetry = Telemetry(UNUSED_URL)  # never started: spans are dropped at once, as with a full queue
        began = time.thread_time()
        traces = [telemetry.begin([], sample) for _ in range(requests)]
        for trace in traces:
            telemetry.outgoing(trace, telemetry.new_span_id())
        begin_seconds = time.thread_time() - began
        call = make_call(policy, traces[0])
        records = [make_record(telemetry, call, trace) for trace in traces]
        began = time.thread_time()
        for record in records:
            telemetry.record(record)
        record_seconds = time.thread_time() - began
        print(f"{sample:8.0%} {micros(begin_seconds, requests):17.1f} {micros(record_seconds, requests):8.1f}")


if __name__ == "__main__":
    main()
