"""The bundled engine as a process under supervision: started, watched, and started again when it dies or stalls.

Calls that it worked on are failed over by the router, or end with a truthful error; the breaker keeps others away
until its health check is good again. A request that it died of is not sent to it once more (`routing.poison`).
"""

from __future__ import annotations

import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from gateway.cli.common import fail, say, warn

START_SECONDS_MAX = 300.0  # for a large model to load
STOP_SECONDS_MAX = 15.0  # to end by itself
LOOK_SECONDS = 0.5
UNWELL_SECONDS_MAX = 20.0  # of health checks that fail or hang, after which it is killed; a stalled step fails them
PAUSE_FIRST_SECONDS = 0.5  # between a death and the next start; doubles while it does not live
PAUSE_MAX_SECONDS = 30.0
LIVED_SECONDS = 60.0  # after which a death is the first again
LOG_LINES_SHOWN = 15


class EngineProcess:
    """`with` starts it and waits until it answers, or until it is to be stopped; leaving stops it and its supervision.

    Not to be used where a signal raises KeyboardInterrupt: that could come when the process is there and not yet noted.
    """

    def __init__(self, command: list[str], root: str, log: Path, told_to_stop: Callable[[], bool]) -> None:
        self._command = command
        self._root = root
        self._log = log
        self._told_to_stop = told_to_stop
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="engine supervision", daemon=True)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EngineProcess:
        self._start()
        try:
            self._wait_until_ready()
        except BaseException:
            self._end_process()
            raise
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        if self._watcher.ident is not None:
            self._watcher.join()
        self._end_process()

    def _start(self) -> None:
        with self._log.open("ab") as output:
            # A session of its own: Ctrl-C reaches us alone, and we end the engine when the last answer is out. If we
            # are killed, the end of the pipe ends it.
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        started = time.monotonic()
        with Console(stderr=True).status("starting the engine ...") as status:
            while not answers(f"{self._root}/health"):
                if self._told_to_stop():
                    return
                seconds = time.monotonic() - started
                if self._process.poll() is not None or seconds > START_SECONDS_MAX:
                    tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
                    fail(f"the engine did not start. The end of {self._log}:\n{tail}")
                status.update(f"starting the engine ... {seconds:.0f} s")
                time.sleep(0.1)
        say(f"engine ready on {self._root} after {time.monotonic() - started:.1f} s")

    # The thread

    def _watch(self) -> None:
        deaths, patience_seconds = 0, UNWELL_SECONDS_MAX  # the first one was well before this thread began
        while not self._stopping.is_set():
            lived_seconds, why = self._until_it_ends(patience_seconds)
            patience_seconds = START_SECONDS_MAX
            if self._stopping.is_set():
                return
            deaths = 1 if lived_seconds >= LIVED_SECONDS else deaths + 1
            pause = min(PAUSE_FIRST_SECONDS * (1 << min(deaths - 1, 10)), PAUSE_MAX_SECONDS)
            warn(f"the engine {why}; {self._log} says more. It is started again in {pause:g} s")
            self._end_process()
            if not self._stopping.wait(pause):
                self._start()

    def _until_it_ends(self, patience_seconds: float) -> tuple[float, str]:
        """How long it lived, and what became of it. `patience_seconds` is for its first good health check."""
        assert self._process is not None
        started = well_at = time.monotonic()
        while not self._stopping.wait(LOOK_SECONDS):
            now = time.monotonic()
            if (code := self._process.poll()) is not None:
                return now - started, f"has ended with exit code {code}"
            if answers(f"{self._root}/health"):
                patience_seconds, well_at = UNWELL_SECONDS_MAX, now
            elif now - well_at > patience_seconds:
                self._process.kill()
                return now - started, f"was not well for {now - well_at:.0f} s, and has been killed"
        return time.monotonic() - started, ""

    def _end_process(self) -> None:
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


def answers(url: str) -> bool:
    """Whether a GET is answered with 200 within a second."""
    try:
        with urllib.request.urlopen(url, timeout=1.0) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
