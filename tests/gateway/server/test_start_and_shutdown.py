"""Readiness, background tasks, start and shutdown of the application."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.billing import drift_monitor, recovery
from gateway.billing.ledger.chain import segments
from gateway.core import supervision
from gateway.deployments import engine_reports, health_checks
from gateway.limits import limiter
from gateway.server import app as app_module
from tests.gateway.harness import (
    Client,
    chat,
    delta,
    in_time,
    settle,
)
from tests.gateway.providers.scripted_server import (
    STREAM_HEAD,
    ReceivedRequest,
    ScriptedServer,
    chunked,
)
from tests.gateway.server.application import Application, policy_for, running


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[Application]:
    async with running(tmp_path, policy_for("http://127.0.0.1:9/v1")) as application:
        yield application


async def test_readiness(app: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await app.get("/health")).status == 200
    ready = await app.get("/ready")
    assert ready.status == 200 and ready.json["policy"] == app.policies.current.hash
    monkeypatch.setattr(app.gateway._parts.ledger, "_fault", "the disk is full")
    assert (await app.get("/ready")).json["faults"] == ["the ledger cannot be written"]
    monkeypatch.setattr(app.gateway._parts.ledger, "_fault", None)
    app.gateway.drain()
    draining = await app.get("/ready")
    assert draining.status == 503 and draining.json["faults"] == ["the gateway is shutting down"]
    refused = await app.ask(chat())
    assert refused.status == 503 and refused.json["error"]["code"] == "overloaded"
    assert (await app.get("/health")).status == 200


@pytest.mark.parametrize("essential", [True, False])
async def test_a_background_task_that_keeps_failing_is_named(
    app: Application, monkeypatch: pytest.MonkeyPatch, essential: bool
) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(supervision, "FAILURES_UNTIL_DOWN", 1)
    failed = asyncio.Event()

    async def failing() -> None:
        failed.set()
        await asyncio.sleep(0)
        raise ZeroDivisionError("a client's text")

    task = app.gateway.supervisor.start("a task", failing, essential=essential)
    await in_time(failed.wait())
    await settle()
    ready = await app.get("/ready")
    assert ready.json["tasks_down"] == {"a task": "ZeroDivisionError"}
    assert ready.status == (503 if essential else 200)
    assert ready.json["faults"] == (["the background task 'a task' keeps failing"] if essential else [])
    metrics = (await app.get("/metrics")).content.decode()
    assert 'warmpath_task_failures_total{task="a task"}' in metrics and 'warmpath_task_down{task="a task"} 1' in metrics
    await in_time(task.cancel())
    assert (await app.get("/ready")).json["tasks_down"] == {}


@pytest.mark.parametrize(
    ("task", "module", "work"),
    [
        ("health checks", health_checks.HealthChecks, "check_once"),
        ("reconciliation", drift_monitor.DriftMonitor, "sample"),
        ("ledger recovery", recovery.CrashRecovery, "catch_up"),
        ("engine reports", engine_reports.EngineReports, "sync_with_policy"),
        ("limits", limiter.Limiter, "extend_due"),
    ],
)
async def test_each_background_task_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, module: type, work: str
) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(health_checks, "CHECK_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(limiter, "RETRY_SECONDS", 0.001)
    runs, again = 0, asyncio.Event()

    async def failing_once(_: Any) -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise ZeroDivisionError
        again.set()
        await asyncio.Event().wait() if task != "limits" else await asyncio.sleep(0.001)

    monkeypatch.setattr(module, work, failing_once)
    async with running(tmp_path, policy_for("http://127.0.0.1:9/v1")) as app:
        await in_time(again.wait())
        assert app.gateway.supervisor.failures == {task: 1}


async def test_a_ledger_that_is_taken_is_told_in_one_line(tmp_path: Path) -> None:
    app = Application(tmp_path, policy_for("http://127.0.0.1:9/v1"))
    app.ledger.mkdir(parents=True)
    with (app.ledger / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711")
        lock.flush()
        message = await app.start()
    assert message["type"] == "lifespan.startup.failed"
    assert "is being written by process 4711" in message["message"] and "\n" not in message["message"]


async def test_a_storage_that_is_away_is_told_in_one_line(tmp_path: Path) -> None:
    app = Application(tmp_path, policy_for("http://127.0.0.1:9/v1"), storage="redis://127.0.0.1:9/0")
    message = await app.start()
    assert message["type"] == "lifespan.startup.failed"
    assert "Redis cannot be reached" in message["message"] and "\n" not in message["message"]
    assert not (app.ledger / "lock").exists()


async def test_a_pepper_that_is_not_the_storage_s_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy, storage = policy_for("http://127.0.0.1:9/v1"), f"sqlite:///{tmp_path / 'state.db'}"

    def warnings() -> list[str]:
        return [each.getMessage() for each in caplog.records if "WARMPATH_KEY_PEPPER" in each.getMessage()]

    for _ in range(2):
        async with running(tmp_path, policy, storage=storage):
            assert warnings() == []
    async with running(tmp_path, policy, storage=storage, key_pepper="another"):
        (warning,) = warnings()
        assert "warmpath keys change-pepper" in warning


async def test_the_shutdown_waits_for_calls_that_were_cut_off_to_settle(tmp_path: Path) -> None:
    async def script(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(delta("one")))

    async with ScriptedServer(script) as server:
        app = Application(tmp_path, policy_for(server.base_url))
        await app.start()
        settling = asyncio.Event()

        async def record_comes_late(call_id: str, *, patient: bool = False) -> bytes | None:
            settling.set()
            await asyncio.sleep(0.02)
            return None

        (known,) = app.gateway._parts.fleet
        known.provider.recorded_usage = record_comes_late  # type: ignore[method-assign]
        client = Client(chat(stream=True))
        serving = app.begin(client)
        await in_time(client.first_bytes.wait())
        client.leave()
        await in_time(settling.wait())
        assert (await app.stop())["type"] == "lifespan.shutdown.complete"  # with the ledger closed
        assert serving.done() and b"client_gone" in segments(app.ledger)[-1].read_bytes()


async def test_the_shutdown_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "LAST_CALLS_SECONDS", 0.02)
    app = Application(tmp_path, policy_for("http://127.0.0.1:9/v1"))
    await app.start()
    serving = app.begin(Client([None]))
    await settle()
    assert (await app.stop())["type"] == "lifespan.shutdown.complete"
    serving.cancel()
    await asyncio.wait([serving])
