"""The bytes of `otlp`, parsed by OpenTelemetry's own classes."""

import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from gateway.telemetry import otlp
from gateway.telemetry.otlp import AttributeValue

TRACE_ID, SPAN_ID, PARENT_ID = bytes(range(16)), bytes(range(8)), bytes(range(8, 16))


def test_a_span_with_all_fields() -> None:
    written = otlp.span(
        otlp.trace_fields(TRACE_ID, "vendor=1"), SPAN_ID, PARENT_ID, 1_700_000_000_000_000_001, 2**63,
        otlp.constant_fields(
            "chat mödel", [otlp.attribute(str, "a", "b")], kind=Span.SPAN_KIND_CLIENT, remote_parent=True, failed=True
        ),
        otlp.attribute(int, "n", 1),
        otlp.event("first_chunk", 7),
    )  # fmt: skip
    read = Span.FromString(written)
    assert (read.trace_id, read.span_id, read.parent_span_id) == (TRACE_ID, SPAN_ID, PARENT_ID)
    assert (read.trace_state, read.name, read.kind) == ("vendor=1", "chat mödel", Span.SPAN_KIND_CLIENT)
    assert (read.start_time_unix_nano, read.end_time_unix_nano) == (1_700_000_000_000_000_001, 2**63)
    assert [(event.name, event.time_unix_nano) for event in read.events] == [("first_chunk", 7)]
    assert (read.status.code, read.flags) == (Status.STATUS_CODE_ERROR, 0x301)
    assert [attribute.key for attribute in read.attributes] == ["a", "n"]


def test_a_span_without_optional_fields() -> None:
    read = Span.FromString(
        otlp.span(
            otlp.trace_fields(TRACE_ID, ""),
            SPAN_ID,
            b"",
            1,
            2,
            otlp.constant_fields("admit", [], kind=Span.SPAN_KIND_INTERNAL),
        )
    )
    assert read == Span(
        trace_id=TRACE_ID, span_id=SPAN_ID, name="admit", kind=Span.SPAN_KIND_INTERNAL, start_time_unix_nano=1,
        end_time_unix_nano=2, flags=0x101,
    )  # fmt: skip


@pytest.mark.parametrize(
    "value", ["", "x", "é" * 100, "y" * 20_000, True, False, 0, 1, 127, 128, -1, 2**63 - 1, -(2**63), 0.5, -0.0]
)
def test_values_keep_their_types(value: AttributeValue) -> None:
    expected = {
        str: lambda: AnyValue(string_value=str(value)),
        bool: lambda: AnyValue(bool_value=bool(value)),
        int: lambda: AnyValue(int_value=int(value)),  # type: ignore[arg-type]
        float: lambda: AnyValue(double_value=float(value)),  # type: ignore[arg-type]
    }[type(value)]()
    (attribute,) = Span.FromString(otlp.attribute(type(value), "the.name", value)).attributes
    assert (attribute.key, attribute.value) == ("the.name", expected)


@pytest.mark.parametrize("values", [(), ("stop",), ("a", "", "ö" * 200)])
def test_lists_of_strings(values: tuple[str, ...]) -> None:
    (attribute,) = Span.FromString(otlp.attribute(tuple, "reasons", values)).attributes
    assert attribute.value == AnyValue(array_value=ArrayValue(values=[AnyValue(string_value=v) for v in values]))
