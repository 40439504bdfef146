"""`warmpath serve --workers N`: a supervisor process and N gateway workers on one port.

The kernel distributes new connections between the workers (SO_REUSEPORT). Workers share state through the storage, as
several replicas do: keys, limits, cached answers, batches. Each worker has its own name and its own chain in the
ledger. A restarted worker has the same name and chain, so it recovers the calls that its predecessor left open. The
deployments' concurrency slots are divided among the workers.

  a worker dies                    its streams break; it restarts at once, with growing pauses if that happens often
  a worker cannot start at first   all workers and the supervisor stop; the log says why
  SIGTERM, SIGINT                  all drain; a second signal ends the lame-duck phase; stragglers are killed
  SIGHUP                           all reload the policy
  the supervisor is killed         the workers drain and exit

The supervisor forks workers at any time, so it has no event loop, no threads and no connections.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path

from gateway.policy.file import PolicyError, load_policy
from gateway.server.app import LAST_CALLS_SECONDS
from gateway.server.listener import listen, run, url_of
from gateway.server.policy_checks import IN_SERVICE
from gateway.server.worker_group import WorkerIdentity, socket_path
from gateway.settings import Settings
from gateway.telemetry import configure_logging

WELL_SECONDS = 10.0  # a worker that ran at least so long restarts without a pause
RESTART_FIRST_SECONDS = 0.5
RESTART_MAX_SECONDS = 30.0
STOP_MARGIN_SECONDS = 10.0  # on top of the time that the settings allow a worker for its shutdown
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
READY = b"r"

log = logging.getLogger("warmpath")

_fork = multiprocessing.get_context("fork")


@dataclass
class WorkerProcess:
    """One worker identity, and the process that has this identity now."""

    identity: WorkerIdentity
    process: ForkProcess | None = None
    ready_pipe: int = -1  # read end of the pipe on which the process reports that it is ready
    ready: bool = False
    started_at: float = 0.0
    restart_at: float = 0.0
    pause_seconds: float = 0.0  # before the next restart


def serve(settings: Settings, *, on_ready: Callable[[str], None]) -> bool:
    """Serve until a signal. Returns False if the start failed or a worker had to be killed at the end.

    Raises `PolicyError`, `OSError`, `ValueError`.
    """
    if settings.storage.startswith("memory:"):
        raise ValueError(
            "several workers need shared storage: WARMPATH_STORAGE must be sqlite:///FILE or redis://HOST, not memory://"
        )
    configure_logging(settings.log_level, json=True)
    load_policy(settings.policy, checks=IN_SERVICE)
    listen(settings.host, settings.port).close()  # SO_REUSEPORT would not detect another program on this port
    with (
        listen(settings.host, settings.port, shared=True) as reserved,
        _signals() as signals,
        _identities(settings) as identities,
    ):
        url = url_of(reserved)
        settings = settings.model_copy(update={"port": reserved.getsockname()[1]})
        gc.freeze()  # a garbage collection in a worker would copy the memory it shares with the supervisor
        return Supervisor(settings, identities, signals).run(lambda: on_ready(url))


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """Yield a socket from which the numbers of arriving signals can be read, one byte each."""
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        there.setblocking(False)
        before = {sig: signal.signal(sig, lambda *_: None) for sig in SIGNALS}
        signal.set_wakeup_fd(there.fileno())
        try:
            yield here
        finally:
            signal.set_wakeup_fd(-1)
            for sig, handler in before.items():
                signal.signal(sig, handler)


@contextlib.contextmanager
def _identities(settings: Settings) -> Iterator[list[WorkerIdentity]]:
    """Yield one identity per worker. The sockets are in a private folder with a path short enough for Unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="warmpath-"))
    try:
        with contextlib.ExitStack() as open_sockets:
            identities = []
            for number in range(settings.workers):
                listener = open_sockets.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(str(socket_path(folder, number)))
                listener.listen()
                identities.append(WorkerIdentity(number, settings.workers, folder, listener))
            yield identities
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Supervisor:
    """Starts, restarts and stops the worker processes. Single-threaded; `run` returns when all have stopped."""

    def __init__(self, settings: Settings, identities: list[WorkerIdentity], signals: socket.socket) -> None:
        self._settings = settings
        self._signals = signals
        self._workers = [WorkerProcess(identity) for identity in identities]
        self._lifeline, self._lifeline_end = os.pipe()  # closes when this process dies
        self._stop_before: float | None = None  # monotonic seconds; set once the workers got their stop signal
        self._failed = False

    def run(self, on_ready: Callable[[], None]) -> bool:
        """Keep the workers running until they are stopped. True if all became ready and none failed."""
        all_ready = False
        try:
            while self._stop_before is None or any(worker.process for worker in self._workers):
                self._start_due()
                self._wait()
                for worker in self._workers:
                    if worker.process is not None and worker.process.exitcode is not None:
                        self._ended(worker, worker.process.exitcode, all_ready)
                if not all_ready and all(worker.ready for worker in self._workers):
                    all_ready = True
                    on_ready()
                if self._stop_before is not None and time.monotonic() > self._stop_before:
                    self._kill()
        finally:  # closing the lifeline makes every worker exit, whatever happened here
            os.close(self._lifeline_end)
            os.close(self._lifeline)
        return all_ready and not self._failed

    def _start_due(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.process is None and self._stop_before is None and now >= worker.restart_at:
                worker.ready_pipe, report_pipe = os.pipe()
                worker.process = _fork.Process(target=self._work, args=(worker.identity, report_pipe))
                worker.process.start()
                os.close(report_pipe)
                worker.started_at = now

    def _wait(self) -> None:
        """Wait for a signal, a ready report, the end of a process, or the next due restart."""
        now = time.monotonic()
        due = [worker.restart_at for worker in self._workers if worker.process is None]
        if self._stop_before is not None:
            due = [self._stop_before]
        ends = [worker.process.sentinel for worker in self._workers if worker.process is not None]
        ready_pipes = [worker.ready_pipe for worker in self._workers if worker.ready_pipe >= 0]
        happened = wait([self._signals, *ends, *ready_pipes], max(0.0, min(due) - now) if due else None)
        for worker in self._workers:
            if worker.ready_pipe in happened:
                worker.ready |= os.read(worker.ready_pipe, 1) == READY
                os.close(worker.ready_pipe)
                worker.ready_pipe = -1
        if self._signals in happened:
            for sig in self._signals.recv(64):
                self._handle(signal.Signals(sig))

    def _handle(self, sig: signal.Signals) -> None:
        if sig == signal.SIGHUP:
            self._send(signal.SIGHUP)
        else:
            self._stop()

    def _stop(self) -> None:
        if self._stop_before is None:
            settings = self._settings
            allowed_seconds = (
                settings.lame_duck_seconds + settings.drain_seconds + LAST_CALLS_SECONDS + STOP_MARGIN_SECONDS
            )
            self._stop_before = time.monotonic() + allowed_seconds
        self._send(signal.SIGTERM)

    def _send(self, sig: signal.Signals) -> None:
        for worker in self._workers:
            if worker.process is not None and worker.process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.process.pid, sig)

    def _kill(self) -> None:
        self._failed = True
        for worker in self._workers:
            if worker.process is not None:
                log.error("worker %d did not stop in time; killing it", worker.identity.number)
                worker.process.kill()
                worker.process.join()

    def _ended(self, worker: WorkerProcess, code: int, all_ready: bool) -> None:
        assert worker.process is not None
        worker.process.close()
        worker.process = None
        if worker.ready_pipe >= 0:
            os.close(worker.ready_pipe)
            worker.ready_pipe = -1
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        if self._stop_before is not None:
            self._failed |= worker.ready and code != 0
            return
        if not all_ready:
            log.critical("worker %d %s before it was ready", worker.identity.number, how)
            self._failed = True
            self._stop()
            return
        now = time.monotonic()
        if worker.ready and now - worker.started_at >= WELL_SECONDS:
            worker.pause_seconds = 0.0
        log.error("worker %d %s; restarting in %g s", worker.identity.number, how, worker.pause_seconds)
        worker.restart_at = now + worker.pause_seconds
        worker.pause_seconds = min(max(2 * worker.pause_seconds, RESTART_FIRST_SECONDS), RESTART_MAX_SECONDS)
        worker.ready = False

    def _work(self, identity: WorkerIdentity, report_pipe: int) -> None:
        """Run one worker, in its process. The process keeps only the lifeline pipe of the supervisor's resources."""
        signal.set_wakeup_fd(-1)
        for sig in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sig, signal.SIG_DFL)  # until the server handles them
        os.close(self._lifeline_end)
        for each in self._workers:
            if each.ready_pipe >= 0:
                os.close(each.ready_pipe)
        try:
            started = run(
                self._settings, on_ready=lambda _: _report_ready(report_pipe), worker=identity, lifeline=self._lifeline
            )
        except (PolicyError, OSError, ValueError) as error:
            log.critical("worker %d cannot start: %s", identity.number, error)
            started = False
        sys.exit(0 if started else 1)


def _report_ready(report_pipe: int) -> None:
    os.write(report_pipe, READY)
    os.close(report_pipe)


__all__ = ["serve"]
