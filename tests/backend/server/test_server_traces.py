"""Spans of a traced request that a collector receives from a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.otlp_collector import Collector, attributes, collecting

if TYPE_CHECKING:
    from tests.backend.server.conftest import StartServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PARENT = "b7ad6b7169203331"
STAGES = ["engine.tokenize", "engine.queue", "engine.prefill", "engine.decode", "engine.detokenize"]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def test_the_phases_of_a_request_add_up_under_the_callers_span(start_server: StartServer, collector: Collector) -> None:
    traces = {name: f"{number:032x}" for number, name in enumerate(("plain", "stopped", "many", "embed", "off"), 1)}

    def under(name: str) -> dict[str, str]:
        return {"traceparent": f"00-{traces[name]}-{PARENT}-{'00' if name == 'off' else '01'}"}

    with start_server("--otlp-endpoint", collector.url) as server:
        client = server.client(strict=False)
        options: Any = {"model": server.model, "prompt": "The quick " * 30, "max_tokens": 20, "temperature": 0}
        reply = client.completions.create(**options, extra_headers=under("plain"))
        text = reply.choices[0].text
        client.completions.create(**options, stop=text[10:13], extra_headers=under("stopped"))
        client.completions.create(**options, n=2, extra_headers=under("many"))
        client.embeddings.create(model=server.model, input="a", extra_headers=under("embed"))
        client.completions.create(**options, extra_headers=under("off"))

    by_trace: dict[str, list[Any]] = {}
    for span in collector.spans:
        by_trace.setdefault(span.trace_id.hex(), []).append(span)
    assert set(by_trace) == set(traces.values()) - {traces["off"]}
    for name, trace_id in traces.items():
        if name == "off":
            continue
        (root,) = (span for span in by_trace[trace_id] if span.name == "engine.request")
        children = sorted((s for s in by_trace[trace_id] if s is not root), key=lambda s: s.start_time_unix_nano)
        assert root.parent_span_id.hex() == PARENT
        assert {child.parent_span_id for child in children} == {root.span_id}
        assert {child.name for child in children} == set(STAGES[:3] if name == "embed" else STAGES)
        total = root.end_time_unix_nano - root.start_time_unix_nano
        parts = sum(child.end_time_unix_nano - child.start_time_unix_nano for child in children)
        assert total > 0
        assert abs(parts - total) <= 0.05 * total
        assert attributes(root)["gen_ai.request.model"] == "tiny-llama"

    spans = {span.name: attributes(span) for span in by_trace[traces["plain"]]}
    assert reply.usage is not None
    assert spans["engine.request"]["gen_ai.usage.input_tokens"] == reply.usage.prompt_tokens
    assert spans["engine.request"]["gen_ai.usage.output_tokens"] == 20
    assert spans["engine.request"]["gen_ai.latency.time_to_first_token"] > 0
    assert spans["engine.prefill"]["warmpath.prefill.cached_tokens"] == 0
    assert spans["engine.prefill"]["warmpath.prefill.computed_tokens"] == reply.usage.prompt_tokens
    assert spans["engine.decode"] == {"warmpath.decode.output_tokens": 20, "warmpath.decode.preemptions": 0}
    warm = {span.name: attributes(span) for span in by_trace[traces["stopped"]]}
    assert warm["engine.prefill"]["warmpath.prefill.cached_tokens"] > 0
