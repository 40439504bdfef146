import re

import pytest

from gateway.telemetry import Telemetry
from gateway.telemetry.propagation import begin, outgoing
from gateway.types import Trace

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"


def headers(traceparent: str, *more: tuple[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in (("traceparent", traceparent), *more)]


@pytest.mark.parametrize(("flags", "sampled"), [("01", True), ("00", False), ("03", True), ("fe", False)])
def test_a_client_s_trace_and_sampling_decision_are_kept(flags: str, sampled: bool) -> None:
    trace = begin(headers(f"00-{TRACE_ID}-{SPAN_ID}-{flags}"), sample=0.0 if sampled else 1.0)
    assert trace == Trace(int(TRACE_ID, 16), int(SPAN_ID, 16), sampled)


def test_the_known_fields_of_a_later_version_are_read() -> None:
    trace = begin(headers(f"cc-{TRACE_ID}-{SPAN_ID}-01-what-comes-next"), sample=0.0)
    assert (trace.trace_id, trace.sampled) == (int(TRACE_ID, 16), True)


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-01-more",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID[:-1]}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-1",
        f"00-{TRACE_ID}-{SPAN_ID}-0g",
        f"00_{TRACE_ID}_{SPAN_ID}_01",
        f"cc-{TRACE_ID}-{SPAN_ID}-01.more",
        "\xff" * 55,
    ],
)
def test_a_malformed_context_begins_a_new_trace(traceparent: str) -> None:
    trace = begin(headers(traceparent, ("tracestate", "a=1")), sample=1.0)
    assert trace.trace_id not in (0, int(TRACE_ID, 16))
    assert (trace.parent_span_id, trace.sampled, trace.tracestate) == (0, True, "")


def test_a_context_sent_twice_is_malformed() -> None:
    twice = headers(f"00-{TRACE_ID}-{SPAN_ID}-01") * 2
    assert begin(twice, sample=0.0).parent_span_id == 0


def test_new_traces_are_sampled_at_the_given_rate() -> None:
    assert not any(begin([], sample=0.0).sampled for _ in range(200))
    assert all(begin([], sample=1.0).sampled for _ in range(200))
    sampled = sum(begin([], sample=0.5).sampled for _ in range(2000))
    assert 800 < sampled < 1200  # nine standard deviations


def test_sampling_depends_on_the_trace_id_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for low_bits, sampled in ((0, True), ((1 << 62) - 1, True), (1 << 62, False)):
        monkeypatch.setattr("gateway.telemetry.propagation.random.getrandbits", lambda _, low=low_bits: 7 << 64 | low)
        assert begin([], sample=0.25).sampled is sampled


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        (["a=1"], "a=1"),
        (["a=1 , b=2", "c@d=3"], "a=1,b=2,c@d=3"),
        (["a=1,,b=2"], "a=1,b=2"),
        (["a=1,a=2"], ""),
        (["A=1"], ""),
        (["a"], ""),
        (["a=1\x01"], ""),
        ([",".join(f"k{i}=1" for i in range(33))], ""),
        (["a=" + "x" * 250, "b=" + "x" * 250, "c=" + "x" * 250], ""),
    ],
)
def test_tracestate_is_forwarded_whole_or_not_at_all(values: list[str], kept: str) -> None:
    trace = begin(headers(f"00-{TRACE_ID}-{SPAN_ID}-01", *(("tracestate", value) for value in values)), sample=0.0)
    assert trace.tracestate == kept


def test_outgoing_headers_have_the_attempt_as_parent_and_no_baggage() -> None:
    telemetry = Telemetry()
    trace = telemetry.begin(
        headers(f"00-{TRACE_ID}-{SPAN_ID}-01", ("tracestate", "a=1"), ("baggage", "user=alice")), sample=0.0
    )
    span_id = telemetry.new_span_id()
    sent = telemetry.outgoing(trace, span_id)
    assert sent == {"traceparent": f"00-{TRACE_ID}-{span_id:016x}-01", "tracestate": "a=1"}


def test_an_unsampled_trace_is_forwarded_as_unsampled() -> None:
    sent = outgoing(Trace(trace_id=1, parent_span_id=0, sampled=False), 2)
    assert sent == {"traceparent": "00-00000000000000000000000000000001-0000000000000002-00"}
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-00", sent["traceparent"])
