"""The engine's side of the grammar processes (grammar_worker.py): starts them, and exchanges tokens for masks.

`GrammarWorker` is the process that holds the tokenizer. `GrammarProcess` is one compiled grammar, in a child of it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from backend.engine import grammar_worker as worker
from backend.engine.grammar_positions import unpack_position

COMPILE_WAIT_SECONDS = 60.0  # wall time, on a machine without idle CPU time for grammars
SLOW_SECONDS = 0.02  # CPU time: a slower call counts against the budgets of its request and its tenant
REQUEST_SLOW_SECONDS = 10.0  # CPU time of the slow calls for one sequence
REAP_SECONDS = 0.01  # between two looks at a child that the kernel is ending
RECEIVED_BYTES = 256 * 1024  # of one call of recv

ROOT = Path(__file__).parents[2]


class GrammarError(Exception):
    """The request's grammar is malformed, cannot be enforced, or exceeds a budget."""

    cpu_seconds = 0.0  # of a slow compilation


class GrammarWorker:
    """The process that holds the tokenizer. Starts at the first grammar, because that takes up to a second.

    Thread-safe. `close` ends it and all its children.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`vocab_size` is that of the model, which may be larger than that of the tokenizer."""
        self.vocab_size = vocab_size
        self._tokenizer_json = tokenizer_json
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        weakref.finalize(self, _end, self.__dict__)

    def fork(self) -> tuple[int, socket.socket]:
        """Starts a child. Returns its pid and a connection to it. Raises GrammarError."""
        if not self._eos_token_ids:
            raise GrammarError("this model has no end-of-sequence token")
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            try:
                if self._control is None:
                    self._control = self._start()
                socket.send_fds(self._control, [worker.CONTROL.pack(worker.FORK, 0)], [theirs.fileno()])
                return self._answer(self._control), ours
            except (OSError, EOFError) as error:
                self._stop()
                ours.close()
                raise GrammarError("the process for grammars has failed; try again") from error

    def reap(self, pid: int) -> int:
        """Ends a child, and returns its exit status: the negative number of a signal, or 0.

        Waits until the child has ended, which can take long because its priority may be low.
        """
        while (status := self._reap(pid)) == worker.RUNNING:
            time.sleep(REAP_SECONDS)
        return status

    def _reap(self, pid: int) -> int:
        with self._lock:
            try:
                if self._control is None:
                    return 0
                self._control.sendall(worker.CONTROL.pack(worker.REAP, pid))
                return self._answer(self._control)
            except (OSError, EOFError):
                self._stop()
                return 0

    def close(self) -> None:
        """Ends the process and its children. Safe to call twice."""
        with self._lock:
            self._stop()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", worker.__name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        vocabulary = {"tokenizer": self._tokenizer_json, "size": self.vocab_size, "eos": self._eos_token_ids}
        document = json.dumps(vocabulary).encode()
        ours.sendall(worker.CONTROL.pack(worker.START, len(document)) + document)
        self._answer(ours)
        return ours

    @staticmethod
    def _answer(control: socket.socket) -> int:
        return int(worker.ANSWER.unpack(worker.read_exactly(control, worker.ANSWER.size))[0])

    def _stop(self) -> None:
        _end(self.__dict__)


def _end(state: dict[str, object]) -> None:
    """Ends a worker, by its attributes: it ends when the connection is closed."""
    control, process = state.get("_control"), state.get("_process")
    state["_control"] = state["_process"] = None
    if isinstance(control, socket.socket):
        control.close()
    if isinstance(process, subprocess.Popen):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)


class GrammarProcess:
    """One compiled grammar, shared by all sequences that follow it. Thread-safe."""

    def __init__(self, owner: GrammarWorker, source: str, *, low_priority: bool = False) -> None:
        """Compiles the grammar and computes its first mask. Raises GrammarError.

        With `low_priority`, it is compiled like a slow call from the start.
        """
        self.slow_seconds = 0.0  # CPU time of slow calls that the tenant has not been charged for
        self.memory_kib = 0
        self.error = ""
        self._worker = owner
        self._ids = itertools.count(1)
        self._dropped: deque[int] = deque()  # sequences that have ended, until the next message to the child
        self._live = 0
        self._answers: dict[int, bytes | str] = {}  # by sequence: the next position, or an error
        self._cpu_seconds: dict[int, float] = {}
        self._received = bytearray()
        self._ending = False  # until `_over`, a thread waits for the end of the child
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._pid, self._connection = owner.fork()
        weakref.finalize(self, self._connection.close)
        try:
            self._compile(source.encode(), low_priority=low_priority)
        except BaseException as error:
            self.close()
            if isinstance(error, GrammarError):
                error.cpu_seconds = self.slow_seconds
            raise

    def _compile(self, source: bytes, *, low_priority: bool) -> None:
        self._cpu_seconds[0] = 0.0
        with self._lock:
            self._send(worker.HEADER.pack(worker.COMPILE, len(source), low_priority) + source)
        deadline = time.monotonic() + COMPILE_WAIT_SECONDS
        while (answer := self.answer(0, deadline - time.monotonic())) is None:
            if time.monotonic() >= deadline:
                raise GrammarError(f"compiling it took more than {COMPILE_WAIT_SECONDS:g} seconds")
        if isinstance(answer, str):
            raise GrammarError(answer)
        forced, mask, warnings = unpack_position(answer, self.vocab_size)
        self.first = (forced, mask)
        self.warnings = tuple(filter(None, warnings.decode().split("\n")))

    @property
    def vocab_size(self) -> int:
        return self._worker.vocab_size

    @property
    def is_usable(self) -> bool:
        """Whether new sequences can begin: the process has not ended."""
        return not self._ending

    @property
    def is_idle(self) -> bool:
        """Whether no sequence follows the grammar."""
        return self._live == len(self._dropped)

    def start(self) -> int:
        """Begins a sequence and returns its number. Its first forced tokens and mask are `first`."""
        with self._lock:
            sequence = next(self._ids)
            self._live += 1
            self._cpu_seconds[sequence] = 0.0
            self._send(worker.HEADER.pack(worker.NEW, sequence, 0))
            return sequence

    def drop(self, sequence: int) -> None:
        """Ends a sequence. Takes no lock, because the garbage collector calls it at any point."""
        self._dropped.append(sequence)

    def advance(self, sequence: int, token_id: int) -> None:
        """Passes a token on to the child, which computes the next mask."""
        with self._lock:
            while self._dropped:
                dropped = self._dropped.popleft()
                self._live -= 1
                self._answers.pop(dropped, None)
                self._cpu_seconds.pop(dropped, None)
                self._send(worker.HEADER.pack(worker.DROP, dropped, 0))
            self._send(worker.HEADER.pack(worker.TOKEN, sequence, token_id))

    def answer(self, sequence: int, seconds: float) -> bytes | str | None:
        """The next position of a sequence (`unpack_position`), or an error. None if there is none within `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            with self._lock:
                if sequence not in self._answers and not self.error:
                    self._receive(max(0.0, deadline - time.monotonic()))
                if sequence in self._answers:
                    return self._answers.pop(sequence)
                if self.error:
                    return self.error
            if time.monotonic() >= deadline:
                return None

    def close(self) -> None:
        """Ends the process, without waiting for it. Sequences that still follow the grammar get an error."""
        with self._lock:
            self._end()

    def _send(self, message: bytes) -> None:
        if not self._ending:
            try:
                self._connection.settimeout(None)
                self._connection.sendall(message)
            except OSError:
                self._end()

    def _receive(self, seconds: float) -> None:
        if self._ending:
            self._over.wait(seconds)
            return
        try:
            self._connection.settimeout(seconds)
            data = self._connection.recv(RECEIVED_BYTES)
        except (TimeoutError, BlockingIOError):
            return
        except OSError:
            data = b""
        if not data:
            self._end()
            return
        self._received += data
        while len(self._received) >= worker.REPLY.size:
            kind, sequence, cpu, memory, size = worker.REPLY.unpack_from(self._received)
            end = worker.REPLY.size + size
            if len(self._received) < end:
                return
            content = bytes(self._received[worker.REPLY.size : end])
            del self._received[:end]
            self._take(kind, sequence, cpu / 1e6, memory, content)

    def _take(self, kind: int, sequence: int, cpu_seconds: float, memory_kib: int, content: bytes) -> None:
        self.memory_kib = memory_kib or self.memory_kib
        if sequence not in self._cpu_seconds:
            return  # dropped meanwhile
        if cpu_seconds > SLOW_SECONDS:
            self.slow_seconds += cpu_seconds
            self._cpu_seconds[sequence] += cpu_seconds
        slow = self._cpu_seconds[sequence]
        if sequence and slow > REQUEST_SLOW_SECONDS:
            self._answers[sequence] = (
                f"its masks took {slow:.1f} seconds of CPU time; a request may take {REQUEST_SLOW_SECONDS:g}"
            )
        else:
            self._answers[sequence] = content if kind == worker.MASK else content.decode()

    def _end(self) -> None:
        """Ends the process, and learns why it ended in a thread, because the kernel may take its time."""
        if not self._ending:
            self._ending = True
            self._connection.close()
            threading.Thread(target=self._find_cause, name="grammar end", daemon=True).start()

    def _find_cause(self) -> None:
        status = self._worker.reap(self._pid)
        if status == -signal.SIGPROF:
            self.slow_seconds += worker.MASK_CPU_SECONDS if self._live else worker.COMPILE_CPU_SECONDS
        self.error = _death(status, self._live > 0)
        self._over.set()


def _death(status: int, is_compiled: bool = True) -> str:
    if status == -signal.SIGPROF:
        what, seconds = (
            ("a token", worker.MASK_CPU_SECONDS) if is_compiled else ("compiling", worker.COMPILE_CPU_SECONDS)
        )
        return f"it exceeds the budget of {seconds:g} seconds of CPU time for {what}"
    if status in (-signal.SIGABRT, -signal.SIGSEGV):
        return f"it exceeds the budget of {worker.MEMORY_BYTES // 2**20} MiB of memory"
    return "its process has ended"
