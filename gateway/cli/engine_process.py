"""Supervises the bundled engine's process: starts it, polls its health, and restarts it if it crashes or stalls.

A thread polls the process and `GET /health`. If the engine exits or stays unhealthy for `UNHEALTHY_SECONDS_MAX`, it is
killed and restarted after a pause that doubles with each crash. Its calls in flight are retried by the router or end
with an error. The circuit breaker rejects other calls until the health check succeeds. A request that crashed the
engine is not sent to it again (`gateway/routing/quarantine_checks.py`).
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from gateway.cli.common import fail, print_line, warn

START_STALL_SECONDS_MAX = 300.0  # of a start, without a new line in the engine's log; a large model takes long to load
STOP_SECONDS_MAX = 15.0  # from SIGTERM to SIGKILL
POLL_SECONDS = 0.5
UNHEALTHY_SECONDS_MAX = 20.0  # of failing health checks, after which it is killed; a stalled step fails them
PAUSE_FIRST_SECONDS = 0.5  # between a crash and the restart; doubles with each further crash
PAUSE_MAX_SECONDS = 30.0
STABLE_SECONDS = 60.0  # uptime after which the next crash counts as the first
LOG_LINES_SHOWN = 15
LOG_BYTES_READ = 1 << 16  # at a time
LATER_STAGE = "native kernels"  # in the lines of an engine that serves with torch until its kernels are compiled
LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [A-Z]+ [\w.]+: ")


class EngineProcess:
    """Context manager that runs the engine under supervision.

    Entering starts the engine and waits until it is healthy or `should_stop` returns true. Leaving stops it. Do not use
    it if signals raise KeyboardInterrupt: that could happen between the start of the process and its assignment.
    """

    def __init__(self, command: list[str], root: str, log: Path, should_stop: Callable[[], bool]) -> None:
        self._command = command
        self._root = root
        self._log = log
        self._should_stop = should_stop
        self._stopping = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="engine supervision", daemon=True)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EngineProcess:
        self._start()
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop_process()
            raise
        if not self._should_stop():  # else the end of the process is no crash
            self._supervisor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        if self._supervisor.ident is not None:
            self._supervisor.join()
        self._stop_process()

    def _start(self) -> None:
        self._stages = StartLog(self._log)
        with self._log.open("ab") as output:
            # In its own session, so that Ctrl-C reaches only this process, which stops the engine after the last
            # answer. If this process is killed, the engine stops at the end of its stdin.
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        started, stages = time.monotonic(), self._stages
        print_line("engine: importing torch ...", style="dim")
        with Console(stderr=True).status("starting the engine ...") as status:
            while not answers(f"{self._root}/health"):
                if self._should_stop():
                    return
                for stage in stages.new_lines():
                    print_line(f"engine: {stage}", style="dim")
                if self._process.poll() is not None or stages.seconds_without_progress > START_STALL_SECONDS_MAX:
                    tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
                    fail(f"the engine did not start. Last lines of {self._log}:\n{tail}")
                status.update(f"starting the engine ... {time.monotonic() - started:.0f} s")
                time.sleep(0.1)
        for stage in stages.new_lines():
            print_line(f"engine: {stage}", style="dim")
        print_line(f"engine ready on {self._root} after {time.monotonic() - started:.1f} s")

    # The supervision thread

    def _supervise(self) -> None:
        crashes, is_starting = 0, False  # the first process was healthy when this thread started
        while not self._stopping.is_set():
            uptime_seconds, reason = self._wait_for_end(is_starting)
            is_starting = True
            if self._stopping.is_set():
                return
            crashes = 1 if uptime_seconds >= STABLE_SECONDS else crashes + 1
            pause = min(PAUSE_FIRST_SECONDS * (1 << min(crashes - 1, 10)), PAUSE_MAX_SECONDS)
            warn(f"the engine {reason} (log: {self._log}); restarting it in {pause:g} s")
            self._stop_process()
            if not self._stopping.wait(pause):
                self._start()

    def _wait_for_end(self, is_starting: bool) -> tuple[float, str]:
        """Wait for the end of the process. Returns its uptime and the reason.

        While it is starting, it is killed only if its log does not grow for `START_STALL_SECONDS_MAX`.
        """
        assert self._process is not None
        started = healthy_at = time.monotonic()
        stages = self._stages
        while not self._stopping.wait(POLL_SECONDS):
            now = time.monotonic()
            if (code := self._process.poll()) is not None:
                return now - started, f"exited with exit code {code}"
            lines = stages.new_lines()
            if answers(f"{self._root}/health"):
                is_starting, healthy_at = False, now
                for stage in lines:
                    if LATER_STAGE in stage:
                        print_line(f"engine: {stage}", style="dim")
                continue
            seconds = min(now - healthy_at, stages.seconds_without_progress) if is_starting else now - healthy_at
            if seconds > (START_STALL_SECONDS_MAX if is_starting else UNHEALTHY_SECONDS_MAX):
                self._process.kill()
                return now - started, f"was unhealthy for {now - healthy_at:.0f} s and was killed"
        return time.monotonic() - started, ""

    def _stop_process(self) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


class StartLog:
    """Follows the engine's log while it starts. Each line is a stage of the start, and new lines are its progress."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._progress_at = time.monotonic()

    @property
    def seconds_without_progress(self) -> float:
        """Seconds since `new_lines` last found that the log has grown."""
        return time.monotonic() - self._progress_at

    def new_lines(self) -> list[str]:
        """The complete lines since the last call, without time, level and logger. At most `LOG_BYTES_READ` are read."""
        with contextlib.suppress(OSError), self._path.open("rb") as log:
            log.seek(self._offset)
            chunk = log.read(LOG_BYTES_READ)
            end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1  # progress bars of downloads end with \r
            if not end:
                return []
            self._offset += end
            self._progress_at = time.monotonic()
            lines = re.split(r"[\r\n]+", chunk[:end].decode(errors="replace"))
            shown = (LOG_PREFIX.sub("", line).strip() for line in lines)
            return [line for line in shown if line and not line.startswith("engine ready")]
        return []


def answers(url: str) -> bool:
    """True if a GET is answered with status 200 within a second."""
    try:
        with urllib.request.urlopen(url, timeout=1.0) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
