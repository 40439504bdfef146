"""Starts Python processes by forking an interpreter that has already imported the gateway, or one with the engine.

    start_process, run_to_end   start a process: with pytest `python -m ...` is forked, all else starts as usual
    start_with_file             forks a process that gets an open file
    Launcher                    owns an interpreter; each process that runs tests has up to two
    Launched                    a process that was started; it has what tests need of `subprocess.Popen`
    python -m tests.launcher    the interpreter itself (`serve`)

To import its modules costs a gateway 0.8 and an engine 1 CPU second, and the tests start hundreds. A forked process
is as real as any other: it has its own pid, sockets, files and environment, runs the command that it was given,
and ends by itself. `test_up.py` and `test_wheel.py` start theirs from nothing, because that is what they test.

At its end, Python visits all objects and frees all modules. A forked process copies their memory to do so: half a CPU
second, if a gateway had been forked from an interpreter with torch. So a gateway has an interpreter of its own, and
what was imported before the fork stays excluded from garbage collections.

The interpreter forks a supervisor, and the supervisor forks the process, waits for it, and reports how it ended.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, ClassVar, NoReturn

PYTHON = (sys.executable, "-m")  # how the commands begin that are forked
# What is imported before a fork, by the package whose command is run. Other commands use what the gateway uses.
GATEWAY, ENGINE = "gateway", "backend"
MODULES = {GATEWAY: ("gateway.__main__", "gateway.cli.serve"), ENGINE: ("backend.__main__",)}
MESSAGE_BYTES_MAX = 100_000  # a command with its environment
# Variables that are read when a program is loaded or a module is imported. A forked process cannot have others.
READ_AT_THE_START = ("LD_", "GLIBC_", "MALLOC_", "PYTHON", "HF_")


class Launched:
    """A process that a launcher started. Its methods do what those of `subprocess.Popen` do, in any thread."""

    def __init__(self, command: Sequence[str], reports: IO[bytes]) -> None:
        self.args = command
        self.returncode: int | None = None
        self._reports = reports
        self._lock = threading.Lock()
        self.pid = int(reports.readline())

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, as that of `Popen`. Raises `TimeoutExpired`."""
        with self._lock:
            if self.returncode is not None:
                return self.returncode
            waiting = os.dup(self._reports.fileno())  # another thread may close the file meanwhile
        try:
            if not select.select([waiting], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        finally:
            os.close(waiting)
        with self._lock:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(int(self._reports.readline()))
                self._reports.close()
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = subprocess.Popen[bytes] | Launched


class Launcher:
    """Owns an interpreter that forks. `close` ends the interpreter, and not the processes that it started."""

    def __init__(self, modules: Sequence[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.launcher", str(theirs.fileno()), *modules]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=Path(__file__).parents[1])
        self._control = ours

    def start(
        self, arguments: Sequence[str], stdout: IO[bytes], stderr: IO[bytes],
        env: Mapping[str, str], cwd: Path, file: int | None = None,
    ) -> Launched:  # fmt: skip
        """Start `python -m ARGUMENTS`. It has no input.

        With an open file, the process gets two more arguments: the number of its copy, and the pid of its parent.
        """
        message = json.dumps([*arguments, dict(env), str(cwd)]).encode()
        assert len(message) <= MESSAGE_BYTES_MAX
        reports, report = os.pipe()
        try:
            files = [stdout.fileno(), stderr.fileno(), report, *([] if file is None else [file])]
            socket.send_fds(self._control, [message], files)
        finally:
            os.close(report)
        return Launched([*PYTHON, *arguments], os.fdopen(reports, "rb", buffering=0))

    def close(self) -> None:
        self._control.close()
        self._process.wait()


class _Shared:
    """The launchers of this process, by the package. Each is started when it is needed first."""

    enabled = False
    launchers: ClassVar[dict[str, Launcher]] = {}


def enable() -> None:
    """From now on, `start_process` forks."""
    _Shared.enabled = True


def disable() -> None:
    """End the interpreters, if there are any. From now on, `start_process` does not fork."""
    _Shared.enabled = False
    while _Shared.launchers:
        _Shared.launchers.popitem()[1].close()


def _launcher_for(module: str) -> Launcher:
    package = ENGINE if module.split(".")[0] == ENGINE else GATEWAY
    if package not in _Shared.launchers:
        _Shared.launchers[package] = Launcher(MODULES[package])
    return _Shared.launchers[package]


def start_process(command: Sequence[str], folder: Path, env: Mapping[str, str], cwd: Path) -> Process:
    """Start a process. Its output goes to the files `stdout` and `stderr` in the folder."""
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        if _Shared.enabled and tuple(command[:2]) == PYTHON and _can_be_forked(env):
            return _launcher_for(command[2]).start(command[2:], stdout, stderr, env, cwd)
        return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=dict(env), cwd=cwd)


def start_with_file(module: str, file: int) -> Launched:
    """Fork `python -m MODULE FILE PARENT`. It writes its errors to those of this process."""
    with Path(os.devnull).open("wb") as stdout, os.fdopen(os.dup(2), "wb") as stderr:
        return _launcher_for(module).start([module], stdout, stderr, os.environ, Path.cwd(), file)


def run_to_end(
    command: Sequence[str], env: Mapping[str, str], cwd: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a process to its end. Raises `TimeoutExpired` after so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        process = start_process(command, Path(folder), env, cwd)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        stdout, stderr = ((Path(folder) / name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(command, status, stdout, stderr)


def _can_be_forked(env: Mapping[str, str]) -> bool:
    """Whether a process with this environment may be forked from an interpreter with ours."""
    return all(
        env.get(name) == os.environ.get(name)
        for name in env.keys() | os.environ.keys()
        if name.startswith(READ_AT_THE_START) and name != "PYTHONPATH"
    )


def serve(control: socket.socket) -> list[str] | None:
    """Start processes until the launcher closes the socket.

    Returns None then, and in each process that was started its command line.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes supervisors that have ended
    while True:
        message, (*files,), _, _ = socket.recv_fds(control, MESSAGE_BYTES_MAX, 4)
        if not message:
            return None
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            *command, env, cwd = json.loads(message)
            stdout, stderr, report, *more = files
            if process := os.fork():
                _supervise(process, report, closing=(stdout, stderr, *more))
            os.close(report)
            _become(stdout, stderr, env, cwd)
            return [str(part) for part in (*command, *more, *([os.getppid()] if more else []))]
        for file in files:
            os.close(file)


def _supervise(process: int, report: int, closing: Sequence[int]) -> NoReturn:
    for file in closing:
        os.close(file)
    os.write(report, b"%d\n" % process)
    _, status = os.waitpid(process, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(report, b"%d\n" % status)
    os._exit(0)


def _become(stdout: int, stderr: int, env: Mapping[str, str], cwd: str) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for ours, standard in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(ours, standard)
        os.close(ours)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    os.chdir(cwd)
    sys.path[1:1] = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder not in sys.path]


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        import_module(module)
    gc.collect()
    gc.freeze()
    command = serve(control)
    if command is not None:
        module, *arguments = command
        sys.modules.pop(f"{module}.__main__", None)  # it is run, so it must not have been imported
        sys.argv = ["", *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
