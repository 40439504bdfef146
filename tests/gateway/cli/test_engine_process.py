"""Supervision of a process that only answers health checks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from gateway.cli import engine_process
from gateway.cli.engine_process import EngineProcess, answers
from tests.ports import free_port

PATIENCE_SECONDS = 30
ENGINE = """
import http.server, pathlib, sys, os
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = str(os.getpid()).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer.allow_reuse_address = True
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineProcess:
    monkeypatch.setattr(engine_process, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(engine_process, "PAUSE_FIRST_SECONDS", 0.05)
    monkeypatch.setattr(engine_process, "UNHEALTHY_SECONDS_MAX", 1.0)
    port = free_port()
    command = [sys.executable, "-c", ENGINE, str(port)]
    return EngineProcess(command, f"http://127.0.0.1:{port}", tmp_path / "log", never)


def never() -> bool:
    return False


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def pid(engine: EngineProcess) -> int:
    assert engine._process is not None
    return engine._process.pid


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_it_is_restarted_after_a_crash_or_stall(
    engine: EngineProcess, end: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    health = f"{engine._root}/health"
    with engine:
        first = pid(engine)
        os.kill(first, end)
        until(lambda: pid(engine) != first and answers(health))
    assert not answers(health)
    said = capsys.readouterr().err
    assert ("exit code -9" in said) if end == signal.SIGKILL else ("was unhealthy" in said)


def test_leaving_stops_it(engine: EngineProcess) -> None:
    with engine:
        running = pid(engine)
    with pytest.raises(ProcessLookupError):
        os.kill(running, 0)


def test_a_failed_start_is_reported_with_the_end_of_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    engine = EngineProcess(command, f"http://127.0.0.1:{free_port()}", tmp_path / "log", never)
    with pytest.raises(typer.Exit), engine:
        pass
    assert "no such model" in capsys.readouterr().err


def test_an_engine_that_is_still_starting_is_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    told: list[bool] = []
    threading.Timer(0.2, told.append, [True]).start()
    with EngineProcess(command, f"http://127.0.0.1:{free_port()}", tmp_path / "log", lambda: bool(told)) as engine:
        running = pid(engine)
    with pytest.raises(ProcessLookupError):
        os.kill(running, 0)


def test_an_interrupted_start_reports_no_crash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C may end the engine too, if it does not have its own session yet."""
    # A shell's background process ignores SIGINT, and the engine would inherit that.
    killed = "import os, signal; signal.signal(signal.SIGINT, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGINT)"
    command = [sys.executable, "-c", killed]
    with EngineProcess(command, f"http://127.0.0.1:{free_port()}", tmp_path / "log", lambda: True) as engine:
        assert engine._process is not None
        assert engine._process.wait(PATIENCE_SECONDS) != 0
        assert not engine._supervisor.is_alive(), "it would report a crash"
    assert capsys.readouterr().err == ""


def test_the_stages_of_a_start_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = "print('2026-11-01 10:00:00,123 INFO backend.native.compiler: compiling: 1 of 7', 'loading', sep='\\n')"
    port = free_port()
    command = [sys.executable, "-c", f"{stages}\nsys = __import__('sys'); sys.stdout.flush()\n{ENGINE}", str(port)]
    with EngineProcess(command, f"http://127.0.0.1:{port}", tmp_path / "log", never):
        pass
    told = capsys.readouterr().out.splitlines()
    assert told[:3] == ["engine: importing torch ...", "engine: compiling: 1 of 7", "engine: loading"]


def test_what_a_serving_engine_says_about_its_kernels_is_printed(
    engine: EngineProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It serves with torch meanwhile. Its other lines stay in the log."""
    told = ""

    def has_told(expected: str) -> bool:
        nonlocal told
        told += capsys.readouterr().out
        return expected in told

    with engine, (tmp_path / "log").open("a") as log:
        until(lambda: has_told("engine ready"))
        log.write(
            "2026-11-01 10:00:00,123 INFO backend.native.background: compiling the native kernels (avx2): 3 of 9\n"
        )
        log.write("2026-11-01 10:00:01,123 WARNING other: of no interest\n")
        log.write("2026-11-01 10:00:02,123 INFO backend.engine.kernel_swap: the native kernels are in use\n")
        log.flush()
        until(lambda: has_told("are in use"))
    assert told.splitlines()[-2:] == [
        "engine: compiling the native kernels (avx2): 3 of 9",
        "engine: the native kernels are in use",
    ]


@pytest.mark.parametrize("progresses", [True, False])
def test_a_start_may_take_long_as_long_as_its_log_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progresses: bool
) -> None:
    """Its end is the script's own, or that of a start without progress."""
    monkeypatch.setattr(engine_process, "START_STALL_SECONDS_MAX", 0.7)
    script = "import time, os\nfor i in range(15):\n  time.sleep(0.1)\n  if os.environ['P']: print(i, flush=True)\n"
    monkeypatch.setenv("P", "x" * progresses)
    engine = EngineProcess([sys.executable, "-c", script], f"http://127.0.0.1:{free_port()}", tmp_path / "log", never)
    with pytest.raises(typer.Exit), engine:
        pass
    assert (tmp_path / "log").read_text().endswith("14\n") == progresses
