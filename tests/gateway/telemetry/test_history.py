"""The sums over finished calls, and the rings on disk: exact sums, quantiles, bounds, restarts, several workers."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.telemetry import CallRecord, RecentCalls, Telemetry, history
from gateway.telemetry.call_sums import (
    FOLD_AT,
    LABELS_MAX,
    CallSums,
    GroupedSums,
    Sums,
    bucket_of,
    quantile_ms,
    result_of,
    sums_at,
)
from gateway.telemetry.history import COARSE, FINE, HistoryRecorder, Load, Point, append, merged, read_history
from gateway.types import Attempt, Outcome

NOW = 1_795_000_200  # a multiple of 600


def recorded(*records: CallRecord) -> CallSums:
    recent = RecentCalls()
    telemetry = Telemetry(recent=recent)
    for record in records:
        telemetry.record(record)
    return recent.sums


def point(at: int, requests: int = 1, **fields: Any) -> Point:
    sums = GroupedSums(total=Sums(results={"answered": requests}, ttft={80: requests}))
    return Point(at, 10.0, sums, **fields)


@pytest.mark.parametrize(
    ("status", "outcome", "result"),
    [
        (200, Outcome.COMPLETE, "answered"), (200, Outcome.UPSTREAM_CUT, "failed"), (200, Outcome.TIMEOUT, "failed"),
        (502, Outcome.REFUSED, "failed"), (503, None, "failed"), (429, None, "limited"), (401, None, "rejected"),
        (200, Outcome.CLIENT_GONE, "disconnected"), (499, None, "disconnected"), (200, Outcome.BUDGET_SPENT, "limited"),
    ],
)  # fmt: skip
def test_results(status: int, outcome: Outcome | None, result: str) -> None:
    assert result_of(status, outcome) == result


def test_sums_are_those_of_the_calls(record: CallRecord) -> None:
    assert record.call is not None and record.usage is not None
    paid = msgspec.structs.replace(record, cost=5_000_000_000, currency="USD")
    cut = msgspec.structs.replace(paid, outcome=Outcome.UPSTREAM_CUT, error_code="upstream_cut")
    sums = recorded(*[paid] * (2 * FOLD_AT + 1), cut).take()
    count = 2 * FOLD_AT + 2
    for each in (sums.total, sums.classes["realtime"], sums.models["qwen3"], sums.deployments[record.deployment or ""]):
        assert each.results == {"answered": count - 1, "failed": 1}
        assert each.prompt_tokens == count * record.usage.input
        assert each.cached_tokens == count * record.usage.cache_read
        assert each.output_tokens == count * record.usage.output
        assert each.cost == {"USD": count * 5000}, "in nanos"
        assert each.requests == sum(each.ttft.values()) == count
    assert sums.total.errors == sums.classes["realtime"].errors == {"upstream_cut": 1}
    failed = [each for each in record.attempts if each.outcome != "ok"]
    assert failed and sums.deployments[failed[0].deployment].errors == {failed[0].outcome: count}


def test_what_was_taken_is_gone(record: CallRecord) -> None:
    sums = recorded(record)
    assert sums.take().total.requests == 1
    assert sums.take() == GroupedSums()
    assert sums.take_last_uses() == {"dev": record.timings.started_ns}
    assert sums.take_last_uses() == {}


def test_labels_are_bounded() -> None:
    groups: dict[str, Sums] = {}
    for i in range(10 * LABELS_MAX):
        sums_at(groups, f"m{i}").results["answered"] = 1
    assert len(groups) == LABELS_MAX + 1 and "other" in groups
    many = Sums()
    for i in range(1000):
        many.count_error(f"code_{i}")
    assert len(many.errors) < 50 and sum(many.errors.values()) == 1000


@pytest.mark.parametrize("q", [0.5, 0.95, 0.99])
def test_quantiles_are_those_of_the_times(q: float) -> None:
    drawn = random.Random(3)
    times = [drawn.lognormvariate(5, 1.5) for _ in range(5000)]  # milliseconds
    buckets: dict[int, int] = {}
    for ms in times:
        bucket = bucket_of(round(ms * 1e6))
        buckets[bucket] = buckets.get(bucket, 0) + 1
    found = quantile_ms(q, buckets)
    assert found == pytest.approx(statistics.quantiles(times, n=1000)[round(q * 1000) - 1], rel=0.05)
    assert quantile_ms(q, {}) is None


def test_points_survive_and_rings_are_bounded(tmp_path: Path) -> None:
    file = tmp_path / "0.db"
    count = FINE.length + 20
    for i in range(count):
        append(file, point(NOW + 10 * i))
    last = NOW + 10 * (count - 1)
    fine = read_history(tmp_path, FINE, last - 3600, last)
    assert [each.at for each in fine] == [last - 3600 + 10 * i for i in range(361)]
    assert {each.sums.total.requests for each in fine} == {1}
    coarse = read_history(tmp_path, COARSE, NOW, last)
    assert [each.at for each in coarse] == [NOW + 600 * i for i in range(len(coarse))]
    assert sum(each.sums.total.requests for each in coarse) == count, "nothing is lost or counted twice"
    assert coarse[0].seconds == 600
    with closing(sqlite3.connect(file)) as db:
        assert [db.execute(f"SELECT count(*) FROM {ring.name}").fetchone()[0] for ring in (FINE, COARSE)] == [361, 7]


def test_a_point_that_is_older_than_its_ring_is_not_shown(tmp_path: Path) -> None:
    append(tmp_path / "0.db", point(NOW))
    later = NOW + COARSE.seconds + 5
    assert read_history(tmp_path, COARSE, later - 7 * 86_400, later) == []


def test_workers_are_added_up(tmp_path: Path) -> None:
    for worker in range(3):
        load = Load(in_flight=worker, queued={"batch": 2}, deployments={"a": 1})
        append(tmp_path / f"{worker}.db", point(NOW, 10, load=load, storage_timeouts=worker))
        append(tmp_path / f"{worker}.db", point(NOW, 5, load=Load(in_flight=1, queued={"batch": 5})))
    (found,) = read_history(tmp_path, FINE, NOW, NOW)
    assert found.sums.total.requests == 45
    assert found.load == Load(1 + 1 + 2, {"batch": 15}, {"a": 3}), "the most of each worker"
    assert found.storage_timeouts == 3
    assert found.seconds == 20, "of time, not of workers"


def test_a_damaged_file_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "0.db"
    file.write_bytes(b"no database " * 1000)
    assert read_history(tmp_path, FINE, 0, NOW) == []
    append(file, point(NOW))
    assert len(read_history(tmp_path, FINE, NOW, NOW)) == 1
    assert (tmp_path / "0.damaged").exists()
    assert "is damaged" in caplog.text


def test_points_of_another_version_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "0.db"
    append(file, point(NOW))
    with closing(sqlite3.connect(file)) as db, db:
        db.execute("UPDATE fine SET point = ?", (msgspec.msgpack.encode({"at": "noon"}),))
    assert read_history(tmp_path, FINE, NOW, NOW) == []
    append(file, point(NOW))
    assert len(read_history(tmp_path, FINE, NOW, NOW)) == 1


async def test_the_recorder_writes_at_the_end_of_each_step_and_when_it_stops(
    tmp_path: Path, record: CallRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "FINE", FINE._replace(step_seconds=1))
    monkeypatch.setattr(history, "RINGS", (history.FINE, COARSE))
    recent, timeouts = RecentCalls(), [0]
    telemetry = Telemetry(recent=recent)
    recorder = HistoryRecorder(
        tmp_path, "0", recent.sums, load=lambda: Load(in_flight=7), storage_timeouts=lambda: timeouts[0]
    )
    running = asyncio.create_task(recorder.run())
    telemetry.record(record)
    timeouts[0] = 4
    began = time.time()
    while not (found := read_history(tmp_path, history.FINE, began - 5, time.time() + 5)):
        await asyncio.sleep(0.02)
    assert merged(found).sums.total.requests == 1
    assert (found[0].load.in_flight, found[0].storage_timeouts) == (7, 4)
    telemetry.record(record)
    running.cancel()
    await asyncio.wait([running])
    whole = merged(read_history(tmp_path, history.FINE, began - 5, time.time() + 5))
    assert (whole.sums.total.requests, whole.storage_timeouts) == (2, 4), "the last part of a step is written, too"


def test_an_attempt_counts_at_its_own_deployment(record: CallRecord) -> None:
    tries = (
        Attempt("a", "connect_error", record.timings.started_ns, record.timings.started_ns + 1, 1),
        Attempt("a", "client_gone", record.timings.started_ns, record.timings.started_ns + 1, 2),
        Attempt("b", "ok", record.timings.started_ns, record.timings.ended_ns, 3),
    )
    sums = recorded(msgspec.structs.replace(record, attempts=tries, deployment="b")).take()
    assert sums.deployments["a"] == Sums(errors={"connect_error": 1}), "a client that leaves is no fault"
    assert sums.deployments["b"].results == {"answered": 1}
