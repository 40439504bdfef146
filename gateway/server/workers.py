"""`warmpath serve --workers N`: N gateways on one port, and the process that looks after them.

The kernel deals new connections out to the workers (SO_REUSEPORT). What they share is in the storage, as for several
replicas: keys, limits, answers, batches. Each has a name of its own and so a chain of its own in the ledger, the same
after a restart: it closes what its predecessor left open. The servers' places are divided among them.

  a worker dies                    its streams break; it is started again, at once, later the more often that happens
  it can not start at first        all are stopped, and so is the supervisor: its log says why
  SIGTERM, SIGINT                  all drain; a second one ends their lame-duck time; who takes too long is killed
  SIGHUP                           all reload the policy
  the supervisor is killed         the workers drain and leave

The supervisor is forked and never has a loop, a thread or a connection: it can do so at any time.
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

WELL_SECONDS = 10.0  # a worker that lived so long is started again at once when it dies
RESTART_FIRST_SECONDS = 0.5
RESTART_MAX_SECONDS = 30.0
STOP_MARGIN_SECONDS = 10.0  # beyond what the settings let a worker take for its end
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
READY = b"r"

log = logging.getLogger("warmpath")

_fork = multiprocessing.get_context("fork")


@dataclass
class WorkerProcess:
    """One seat, and the process that has it now."""

    identity: WorkerIdentity
    process: ForkProcess | None = None
    told: int = -1  # the end of a pipe on which it says that it is ready
    ready: bool = False
    started_at: float = 0.0
    restart_at: float = 0.0
    pause_seconds: float = 0.0  # before its next restart


def serve(settings: Settings, *, on_ready: Callable[[str], None]) -> bool:
    """Until a signal says stop. False when the start failed, or a worker had to be killed in the end.

    Raises `PolicyError`, `OSError`, `ValueError`.
    """
    if settings.storage.startswith("memory:"):
        raise ValueError(
            "several workers share their state: WARMPATH_STORAGE must be sqlite:///FILE or redis://HOST, not memory://"
        )
    configure_logging(settings.log_level, json=True)
    load_policy(settings.policy, checks=IN_SERVICE)
    listen(settings.host, settings.port).close()  # who shares a port finds no stranger there
    with (
        listen(settings.host, settings.port, shared=True) as reserved,
        _signals() as signals,
        _identities(settings) as identities,
    ):
        url = url_of(reserved)
        settings = settings.model_copy(update={"port": reserved.getsockname()[1]})
        gc.freeze()  # what is here now is shared: looking through it would copy it
        return Supervisor(settings, identities, signals).run(lambda: on_ready(url))


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """Their numbers, as bytes to be read."""
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
    """With sockets in a folder that only this user can enter, and whose path is short enough for a socket."""
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
    def __init__(self, settings: Settings, identities: list[WorkerIdentity], signals: socket.socket) -> None:
        self._settings = settings
        self._signals = signals
        self._workers = [WorkerProcess(identity) for identity in identities]
        self._lifeline, self._held = os.pipe()  # ends in the workers when this process does
        self._stop_before: float | None = None  # set when they have been told to stop
        self._failed = False

    def run(self, on_ready: Callable[[], None]) -> bool:
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
        finally:  # whatever happens here, no worker stays behind
            os.close(self._held)
            os.close(self._lifeline)
        return all_ready and not self._failed

    def _start_due(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.process is None and self._stop_before is None and now >= worker.restart_at:
                worker.told, tells = os.pipe()
                worker.process = _fork.Process(target=self._work, args=(worker.identity, tells))
                worker.process.start()
                os.close(tells)
                worker.started_at = now

    def _wait(self) -> None:
        """Until something has happened, or is due."""
        now = time.monotonic()
        due = [worker.restart_at for worker in self._workers if worker.process is None]
        if self._stop_before is not None:
            due = [self._stop_before]
        ends = [worker.process.sentinel for worker in self._workers if worker.process is not None]
        telling = [worker.told for worker in self._workers if worker.told >= 0]
        happened = wait([self._signals, *ends, *telling], max(0.0, min(due) - now) if due else None)
        for worker in self._workers:
            if worker.told in happened:
                worker.ready |= os.read(worker.told, 1) == READY
                os.close(worker.told)
                worker.told = -1
        if self._signals in happened:
            for sig in self._signals.recv(64):
                self._told(signal.Signals(sig))

    def _told(self, sig: signal.Signals) -> None:
        if sig == signal.SIGHUP:
            self._tell(signal.SIGHUP)
        else:
            self._stop()

    def _stop(self) -> None:
        if self._stop_before is None:
            settings = self._settings
            patience = settings.lame_duck_seconds + settings.drain_seconds + LAST_CALLS_SECONDS + STOP_MARGIN_SECONDS
            self._stop_before = time.monotonic() + patience
        self._tell(signal.SIGTERM)

    def _tell(self, sig: signal.Signals) -> None:
        for worker in self._workers:
            if worker.process is not None and worker.process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.process.pid, sig)

    def _kill(self) -> None:
        self._failed = True
        for worker in self._workers:
            if worker.process is not None:
                log.error("worker %d does not stop, and is killed", worker.identity.number)
                worker.process.kill()
                worker.process.join()

    def _ended(self, worker: WorkerProcess, code: int, all_ready: bool) -> None:
        assert worker.process is not None
        worker.process.close()
        worker.process = None
        if worker.told >= 0:
            os.close(worker.told)
            worker.told = -1
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
        log.error("worker %d %s; it is started again in %g s", worker.identity.number, how, worker.pause_seconds)
        worker.restart_at = now + worker.pause_seconds
        worker.pause_seconds = min(max(2 * worker.pause_seconds, RESTART_FIRST_SECONDS), RESTART_MAX_SECONDS)
        worker.ready = False

    def _work(self, identity: WorkerIdentity, tells: int) -> None:
        """In the worker: nothing of the supervisor's is left here but what it shares on purpose."""
        signal.set_wakeup_fd(-1)
        for sig in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sig, signal.SIG_DFL)  # until the server handles them
        os.close(self._held)
        for each in self._workers:
            if each.told >= 0:
                os.close(each.told)
        try:
            started = run(
                self._settings, on_ready=lambda _: _say_ready(tells), worker=identity, lifeline=self._lifeline
            )
        except (PolicyError, OSError, ValueError) as error:
            log.critical("worker %d can not start: %s", identity.number, error)
            started = False
        sys.exit(0 if started else 1)


def _say_ready(tells: int) -> None:
    os.write(tells, READY)
    os.close(tells)


__all__ = ["serve"]
