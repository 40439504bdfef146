"""docs/reference/admin.md lists every request that is served, and every field of a call."""

from __future__ import annotations

import json
import re

from gateway.telemetry import CallRecord, RecentCalls
from gateway.telemetry.recent_calls import RECENT_CALLS, RecentCallsQuery, decode_recent_calls
from gateway.types import PhaseTimings, Trace
from tests.docs.markdown import ROOT, code_spans, section, table_rows

PAGE = ROOT / "docs" / "reference" / "admin.md"
ROUTE = re.compile(r'Route\("(/[^"]+)", [\w.]+(?:, methods=\["(\w+)"\])?\)')


def test_the_admin_api_is_the_one_that_is_served() -> None:
    gateway = ROOT / "gateway"
    files = [*(gateway / "admin").glob("*.py"), gateway / "batches" / "operator_api.py"]
    sources = [path.read_text() for path in files]
    found = [route for source in sources for route in ROUTE.findall(source)]
    served = {f"{method or 'GET'} {path.replace(':path', '')}" for path, method in found if path != "/"}
    assert {code_spans(row[0])[0] for row in table_rows(section(PAGE, "Requests"))} == served


def test_every_field_of_a_call_is_documented() -> None:
    recent = RecentCalls()
    recent.add(
        CallRecord(call_id="c", trace=Trace(1, 0, False), server_span_id=1, timings=PhaseTimings(), method="", path="")
    )
    (call,) = decode_recent_calls(recent.newest(RecentCallsQuery(1)))
    text = " ".join(section(PAGE, "The last calls").split())
    assert set(json.loads(bytes(call.json))) - {"time", "worker"} <= set(code_spans(text))
    assert f"the last {RECENT_CALLS} calls that" in text and f"the last {RECENT_CALLS} other calls" in text
