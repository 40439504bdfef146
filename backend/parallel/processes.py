"""The processes of the followers: rank 0 starts them, and watches them until the engine ends.

Each follower has a thread here that waits for its end. If a follower ends before `close`, all others are ended, running
exchanges are aborted, and the listeners of `watch` get the reason.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from backend.engine.errors import RankFailed
from backend.engine.resolved_config import ResolvedConfig
from backend.parallel.group import ExchangeFailed, RankGroup
from backend.parallel.wire import Imported, Link, Loaded, Message, Start

START_SECONDS = 300.0  # until the followers have imported torch
LOAD_SECONDS = 3600.0  # until they have loaded their parts, perhaps from a network file system
EXPLAIN_SECONDS = 5.0  # that an error waits for the end of a follower, which may be its cause
CLOSE_SECONDS = 5.0  # until a follower that was killed has ended

ROOT = Path(__file__).parents[2]
FOLLOWER = "backend.parallel.follower"  # the module that a follower runs

M = TypeVar("M")


class Followers:
    """All followers of an engine, from their start to `close`. Only `close` and `watch` may be called from any thread.

    Methods raise `RankFailed` if a follower has ended.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        """Starts the followers and connects to them; they load their parts while rank 0 loads its own."""
        self.failure: str | None = None
        self._size = config.tensor_parallel_size
        self._lock = threading.Lock()
        self._closing = False
        self._listeners: list[Callable[[str], None]] = []
        self._links: list[Link] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="warmpath-ranks-"))
        store = self._folder / "store"
        self.group: RankGroup | None = None
        try:
            for rank in range(1, self._size):
                self._start(rank)
            for rank, link in enumerate(self._links, 1):
                self._expect(rank, START_SECONDS, Imported)
                link.send(Start(config, rank, store))
            with self.computing():
                self.group = RankGroup(0, self._size, store, config.device)
        except BaseException:
            self.close()
            raise

    def wait_until_loaded(self) -> None:
        """Raises `RankFailed` if a follower cannot load its part."""
        for rank in range(1, self._size):
            answer = self._expect(rank, LOAD_SECONDS, Loaded)
            if answer.error is not None:
                raise RankFailed(f"rank {rank} of {self._size} cannot load its part of the model: {answer.error}")

    def send(self, message: Message) -> None:
        """Sends a message to all followers."""
        for link in self._links:
            link.send(message)

    def check(self) -> None:
        """Raises `RankFailed` if a follower has ended."""
        if self.failure is not None:
            raise RankFailed(self.failure)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """For a computation of all ranks. After an error in it, they are no longer in step, so all followers are ended.

        If a follower has ended, its end is the error.
        """
        self.check()
        try:
            yield
        except (ExchangeFailed, OSError) as error:
            self._explain(error)
            self._fail(f"the {self._size} ranks cannot reach each other: {error}")
            self.check()
        except BaseException as error:
            self._fail(f"rank 0 of {self._size} has failed: {error}")
            raise
        self.check()

    def watch(self, listener: Callable[[str], None]) -> None:
        """Calls `listener` with the reason if a follower ends before `close`: at once, from a thread of its own."""
        with self._lock:
            self._listeners.append(listener)
            failure = self.failure
        if failure is not None:
            listener(failure)

    def close(self) -> None:
        """Ends all followers. Safe to call twice."""
        with self._lock:
            self._closing = True
        self._end_all()
        if self.group is not None:
            self.group.abort()  # otherwise NCCL may wait for the followers when this process ends
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_SECONDS)
        for link in self._links:
            link.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = start_process(theirs.fileno())
        self._links.append(Link(ours))
        self._processes.append(process)
        threading.Thread(target=self._await_end, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    def _expect(self, rank: int, seconds: float, kind: type[M]) -> M:
        """The next message of a follower."""
        try:
            message = self._links[rank - 1].receive(seconds)
        except TimeoutError:
            raise RankFailed(f"rank {rank} of {self._size} has not answered for {seconds:.0f} s") from None
        except (EOFError, OSError) as error:
            self._explain(error)
            raise RankFailed(f"the connection to rank {rank} of {self._size} has ended: {error}") from error
        assert isinstance(message, kind)
        return message

    def _explain(self, error: Exception) -> None:
        """Raises `RankFailed` if a follower has ended or is about to."""
        end = time.monotonic() + EXPLAIN_SECONDS
        while self.failure is None and time.monotonic() < end:
            time.sleep(0.01)
        if self.failure is not None:
            raise RankFailed(self.failure) from error

    def _await_end(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        self._fail(f"rank {rank} of {self._size} (process {process.pid}) {_how(status)}")

    def _fail(self, reason: str) -> None:
        """Ends all followers and running exchanges, unless that has been done. From any thread."""
        with self._lock:
            if self._closing or self.failure is not None:
                return
            self.failure = reason
            listeners = list(self._listeners)
        self._end_all()
        if self.group is not None:
            self.group.abort()
        for listener in listeners:
            listener(reason)

    def _end_all(self) -> None:
        for process in self._processes:
            process.kill()


def start_process(file: int) -> subprocess.Popen[bytes]:
    """Starts a follower with this end of its socket pair.

    It has a session of its own, because an interrupt from the terminal is for rank 0 alone.
    """
    return subprocess.Popen(
        [sys.executable, "-m", FOLLOWER, str(file), str(os.getpid())],
        pass_fds=[file], cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def _how(status: int) -> str:
    if status >= 0:
        return f"has ended with status {status}"
    return f"was ended by {signal.Signals(-status).name}"
