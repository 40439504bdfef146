"""The waterfall of a request."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.cli.trace import waterfall

CALL: dict[str, Any] = {
    "call_id": "req_c13deb128a6911cd6c8d9821", "time": "2026-11-26T15:43:59.124Z", "path": "/v1/chat/completions",
    "status": 200, "outcome": "complete", "error_code": None, "tenant": "dev", "key_id": "k1", "model": "warmpath-demo",
    "class": "realtime", "trace_id": "6428a777" * 4, "deployment": "local", "route_reason": "the only deployment",
    "usage": {"input_uncached": 10, "cache_read": 4, "cache_write": 0, "output": 7}, "predicted_cached_tokens": 4,
    "duration_ms": 120.0, "own_ms": 1.5, "ttft_ms": 20.0,
    "phases": [{"name": "admit", "start_ms": 0.0, "end_ms": 1.0}, {"name": "relay", "start_ms": 1.0, "end_ms": None}],
    "attempts": [{"deployment": "a-deployment-with-a-long-name", "outcome": "ok", "start_ms": 1.0, "end_ms": 119.0}],
}  # fmt: skip


@pytest.mark.parametrize("columns", [40, 60, 80, 160])
def test_lines_fit_the_terminal(columns: int) -> None:
    lines = waterfall(CALL, columns)
    assert max(map(len, lines)) <= columns
    assert any(line.startswith("admit") and line.rstrip().endswith("█") for line in lines)
    text = " ".join(" ".join(lines).split())
    assert "trace 6428a7776428a7776428a7776428a777" in text and "14 prompt tokens, 4 cached (4 predicted)" in text
    assert "first chunk after 20.00 ms" in text
