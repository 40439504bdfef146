"""`warmpath route-log`."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from gateway.core.bounded_log import BoundedLog
from gateway.routing.route_log import CandidateRow, RouteRow
from tests.gateway.cli.conftest import Warmpath


def candidate(name: str, cost: float) -> CandidateRow:
    return CandidateRow(
        deployment=name, cost_seconds=cost, ttft_seconds=0.5, cached_tokens=640, queued_tokens=0, in_flight=1
    )


def write_rows(folder: Path, number: int = 3, prefill: str | None = None) -> None:
    log = BoundedLog(folder / "data" / "routes", "r", what="the route log", max_file_bytes=2**20)
    for minute in range(number):
        row = RouteRow(
            time=f"2026-11-23T10:{minute:02}:00.000Z", call_id=f"call-{minute}", tenant="t", model="m",
            latency_class="realtime", prompt_tokens=1000, candidates=(candidate("a", 0.25), candidate("b", 0.75)),
            candidates_in_all=2, deployment="a", ttft_seconds=1.0, predicted_cached_tokens=640,
            reported_prompt_tokens=1010, reported_cached_tokens=600, prefill=prefill,
        )  # fmt: skip
        log.append(msgspec.json.encode(row))
    log.append(b'{"cut')


def test_the_newest_calls_are_shown_with_prediction_and_outcome(warmpath: Warmpath, tmp_path: Path) -> None:
    write_rows(tmp_path)
    result = warmpath("route-log", "--data", "data", "--last", "2")
    assert result.exit_code == 0, result.stderr
    assert "call-0" not in result.stdout
    for shown in ("call-1", "call-2", "0.250 s", "0.750 s", "1010", "640", "600", "1.000 s"):
        assert shown in result.stdout
    assert "cached tokens: 1200 reported, predictions off by 80 in all" in result.stdout
    assert "time to the first chunk: 0.500 s expected, 1.000 s measured, on average" in result.stdout


def test_one_call_is_shown_with_all_its_candidates(warmpath: Warmpath, tmp_path: Path) -> None:
    write_rows(tmp_path)
    shown = warmpath("route-log", "--data", "data", "--call", "call-1").stdout
    assert "call-1: 1000 prompt tokens, 2 candidates" in shown
    assert "0.750 s" in shown and "answered" in shown


def test_the_prefill_deployment_is_shown(warmpath: Warmpath, tmp_path: Path) -> None:
    write_rows(tmp_path, prefill="p-1")
    assert "a after p-1" in warmpath("route-log", "--data", "data").stdout
    assert "p-1 computed the prompt" in warmpath("route-log", "--data", "data", "--call", "call-1").stdout


def test_json(warmpath: Warmpath, tmp_path: Path) -> None:
    write_rows(tmp_path)
    rows = json.loads(warmpath("route-log", "--data", "data", "--json").stdout)
    assert [row["call_id"] for row in rows] == ["call-0", "call-1", "call-2"]


def test_without_a_log_the_policy_line_is_named(warmpath: Warmpath, tmp_path: Path) -> None:
    result = warmpath("route-log", "--data", "data")
    assert result.exit_code == 1
    assert "routing: {log: true}" in result.stderr
