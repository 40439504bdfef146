"""Compiles grammars and computes masks in processes of their own: `python -m backend.engine.grammar_worker`.

The process loads the tokenizer once and forks a child for each grammar, which costs a few milliseconds. A hostile
grammar can make llguidance take seconds or gigabytes in one call that nothing can interrupt. In a process of its own,
it takes neither the engine's global lock nor its memory, the kernel ends it at its budgets, and no other grammar
notices. A call that takes more than a moment of CPU time continues at a low priority, and in turns: of all slow calls
at a time, one runs, and the worker stops the processes of the others. So slow calls together take one CPU that nothing
else wants, and a tenth of one that the engine wants. That is little for the engine, and enough for an honest large
schema on a machine without idle CPU time. The calls after a slow one begin at the usual priority again, unless slow
calls are a large share of the child's life.

    parent -> worker   START tokenizer | FORK with a socket -> pid | REAP pid -> how it ended
    parent -> child    COMPILE priority grammar | NEW sequence | TOKEN sequence token | DROP sequence
    child -> parent    MASK with forced tokens, or ERROR, for COMPILE and TOKEN
    child -> worker    SLOW pid | DONE pid: a slow call has begun or ended
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from backend.engine.grammar_positions import FIRST_FORCED_CPU_SECONDS, mask_size, pack_position, skip_forced

# Budgets of one grammar. `LEXER_FUEL` allows schemas as large as FHIR's; a usual schema takes a hundredth of each.
COMPILE_CPU_SECONDS = 2.0
MASK_CPU_SECONDS = 1.0  # for one token
MEMORY_BYTES = 192 * 1024 * 1024  # beyond what the tokenizer takes
LEXER_FUEL = 1_000_000
STEP_LEXER_FUEL = 200_000
STEP_ITEMS = 50_000
ROW_ITEMS = 2_000
LEXER_STATES = 50_000
GRAMMAR_SYMBOLS = 500_000
REGEX_CAUSE = re.compile(r"^error: (.+)", re.MULTILINE)  # below the expression with the place marked
ERROR_CHARS = 300  # of llguidance's messages, which can quote a whole grammar

EXPLAINED = {"NoExtensionBias": "no text satisfies it", "NoExtension": "no text satisfies it"}

NICE = 5
SLOW_NICE = 10  # a tenth of what the engine's threads get
TURN_SECONDS = 0.02  # wall time for which one slow call runs while others wait
SLOW_COMPILE_SECONDS = 0.01  # CPU time, after which a call continues at the low priority
SLOW_MASK_SECONDS = 0.003
SLOW_SHARE = 0.25  # of a child's life: with more CPU time in slow calls, it keeps the low priority
SLOW_CREDIT_SECONDS = 0.05
RUNNING = 256  # reply to REAP: the process has not ended yet. REAP does not wait for it
STATM = Path("/proc/self/statm")  # sizes of this process in pages: mapped, resident
EITHER_SYNTAX = "any_grammar"  # instead of `lark_grammar`: Lark or GBNF, translated here because that can take seconds

HEADER = struct.Struct("<BII")  # operation, sequence or length in bytes, token
REPLY = struct.Struct("<BIIII")  # kind, sequence, CPU time in microseconds, memory in KiB, length in bytes
CONTROL = struct.Struct("<BI")  # operation, pid or length in bytes
TURN = struct.Struct("<BI")  # SLOW or DONE, pid
ANSWER = struct.Struct("<i")  # pid, or exit status as subprocess counts it: negative for a signal
COMPILE, NEW, TOKEN, DROP = range(4)
MASK, ERROR = range(2)
START, FORK, REAP = range(3)
SLOW, DONE = range(2)
PR_SET_PDEATHSIG = 1  # of Linux's prctl: a signal when the parent ends


def read_exactly(connection: socket.socket, count: int) -> bytes:
    """Returns `count` bytes. Raises EOFError if the other side has closed the connection."""
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def translated(source: str) -> str:
    """Translates the GBNF of a grammar to Lark. Raises any exception if that fails."""
    document = json.loads(source)
    for each in document["grammars"]:
        if EITHER_SYNTAX in each:
            each["lark_grammar"] = any_to_lark(each.pop(EITHER_SYNTAX))
    return json.dumps(document)


def main() -> None:
    """Serves FORK and REAP until the parent closes the connection, or ends, which it may do at any time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group; the parent decides
    control = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(EOFError, ConnectionError):
        tokenizer = _start(control)
        with contextlib.closing(_Turns()) as turns:
            _work(control, tokenizer, turns)


def _start(control: socket.socket) -> LLTokenizer:
    _, size = CONTROL.unpack(read_exactly(control, CONTROL.size))
    vocabulary = json.loads(read_exactly(control, size))
    tokenizer = LLTokenizer(vocabulary["tokenizer"], n_vocab=vocabulary["size"], eos_token=vocabulary["eos"])
    del vocabulary
    gc.collect()
    gc.freeze()  # the children share this memory
    control.sendall(ANSWER.pack(0))
    return tokenizer


def _work(control: socket.socket, tokenizer: LLTokenizer, turns: _Turns) -> None:
    while True:
        turns.wait_for(control)
        message, sockets, _, _ = socket.recv_fds(control, CONTROL.size, 1)
        if not message:
            return
        message += read_exactly(control, CONTROL.size - len(message))
        operation, pid = CONTROL.unpack(message)
        if operation == FORK:
            answer = _fork(control, sockets[0], tokenizer, turns)
        else:
            turns.remove(pid)
            answer = _reap(pid)
        control.sendall(ANSWER.pack(answer))


class _Turns:
    """Lets the slow calls run one at a time. Those that had the fewest turns are first, so a short call ends soon."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        self._had: dict[int, int] = {}  # turns of each slow call so far, by pid
        self._running = 0  # pid of the one that is not stopped
        self._ends = 0.0  # when its turn ends

    def wait_for(self, control: socket.socket) -> None:
        """Gives turns until the engine has sent something."""
        while True:
            seconds = max(0.0, self._ends - time.monotonic()) if len(self._had) > 1 else None
            readable, _, _ = select.select([control.fileno(), self._reader], [], [], seconds)
            if self._reader in readable:
                self._take(os.read(self._reader, TURN.size))  # messages of this size are never in parts
            if len(self._had) > 1 and time.monotonic() >= self._ends:
                self._next()
            if control.fileno() in readable:
                return

    def remove(self, pid: int) -> None:
        """Forgets a child whose slow call, or whose life, has ended."""
        if self._had.pop(pid, None) is not None:
            _signal(pid, signal.SIGCONT)
            if pid == self._running and self._had:
                self._next()

    def close(self) -> None:
        """Ends the children with slow calls, which do not notice while they are stopped that the engine has ended."""
        for pid in self._had:
            _signal(pid, signal.SIGKILL)

    def _take(self, message: bytes) -> None:
        kind, pid = TURN.unpack(message)
        if kind == DONE:
            self.remove(pid)
        else:
            self._had[pid] = 0
            if len(self._had) == 1:
                self._running = pid
            else:
                _signal(pid, signal.SIGSTOP)

    def _next(self) -> None:
        """Stops the running call, and continues the one that had the fewest turns."""
        pid = min(self._had, key=self._had.__getitem__)
        self._had[pid] = self._had.pop(pid) + 1  # now the last of those with as many turns
        if pid != self._running and self._running in self._had:
            _signal(self._running, signal.SIGSTOP)
        self._running, self._ends = pid, time.monotonic() + TURN_SECONDS
        _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _reap(pid: int) -> int:
    """Ends a child if it still runs, and returns its exit status, or RUNNING until the kernel has ended it."""
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            os.kill(pid, signal.SIGKILL)
            return RUNNING
        return os.waitstatus_to_exitcode(status)
    return 0


def _fork(control: socket.socket, descriptor: int, tokenizer: LLTokenizer, turns: _Turns) -> int:
    pid = os.fork()
    if pid:
        os.close(descriptor)
        return pid
    try:
        control.close()
        _serve(_Child(socket.socket(fileno=descriptor), tokenizer, turns.writer))
    finally:
        os._exit(0)


def _serve(child: _Child) -> None:
    """Runs the calls of a child in a thread. A thread has its own priority, which only ever falls.

    So a slow call is finished by a thread of the low priority, and a new thread runs the calls after it.
    """
    _limit_resources()
    while True:
        child.is_slow = False
        thread = threading.Thread(target=child.run)
        thread.start()
        signal.sigwait({signal.SIGVTALRM})
        _lower_priority(thread)
        child.become_slow()
        thread.join()


class _Child:
    """One grammar, and the positions of its sequences."""

    def __init__(self, connection: socket.socket, tokenizer: LLTokenizer, turns: int) -> None:
        self.is_slow = False
        self._connection = connection
        self._turns = turns  # where the worker learns of slow calls
        self._in_call = False
        self._lock = threading.Lock()  # for `is_slow` and `_in_call`
        self._tokenizer = tokenizer
        self._mask_bytes = mask_size(tokenizer.vocab_size)
        self._grammar: LLMatcher | None = None
        self._sequences: dict[int, LLMatcher] = {}
        self._resident_kib = _resident_kib()
        self._began = time.monotonic()
        self._slow_seconds = 0.0  # CPU time of slow masks

    def run(self) -> None:
        """Answers calls until one was slow, or ends the process when the engine has closed the connection."""
        try:
            while not (self.is_slow and self._has_credit()):
                operation, number, token = HEADER.unpack(read_exactly(self._connection, HEADER.size))
                if operation == COMPILE:
                    if token:  # a low priority from the start
                        os.kill(os.getpid(), signal.SIGVTALRM)
                    self._compile(read_exactly(self._connection, number).decode())
                elif operation == NEW and self._grammar is not None:
                    self._sequences[number] = self._grammar.deep_copy()
                elif operation == DROP:
                    self._sequences.pop(number, None)
                else:
                    self._advance(number, token)
        finally:  # at the end of the connection, or after a bug: then the engine finds the connection closed
            if sys.exc_info()[0] is not None:
                os._exit(0)

    def become_slow(self) -> None:
        """Makes the call that runs, and all others of its thread, take turns with other slow calls."""
        with self._lock:
            self.is_slow = True
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            if self._in_call:
                self._tell(SLOW)

    def _tell(self, kind: int) -> None:
        os.write(self._turns, TURN.pack(kind, os.getpid()))

    def _has_credit(self) -> bool:
        return self._slow_seconds <= SLOW_CREDIT_SECONDS + SLOW_SHARE * (time.monotonic() - self._began)

    def _compile(self, source: str) -> None:
        begun, first = time.process_time(), b""
        with self._cpu_budget(SLOW_COMPILE_SECONDS, COMPILE_CPU_SECONDS):
            compiled, error = _compiled(self._tokenizer, source)
            if compiled is not None:
                forced, mask = skip_forced(compiled, FIRST_FORCED_CPU_SECONDS)
                first = pack_position(forced, mask[: self._mask_bytes])
                error = _error_after(compiled, mask)
        warnings = "" if compiled is None else "\n".join(compiled.get_grammar_warnings())
        self._grammar = compiled
        self._reply(0, begun, first + warnings.encode(), error)

    def _advance(self, sequence: int, token: int) -> None:
        begun, matcher = time.process_time(), self._sequences[sequence]
        with self._cpu_budget(SLOW_MASK_SECONDS, MASK_CPU_SECONDS):
            # After the end of the grammar, only an end-of-sequence token can follow, which it need not see.
            if not matcher.is_stopped():
                matcher.consume_token(token)
            forced, mask = skip_forced(matcher)
        taken = time.process_time() - begun
        self._slow_seconds += taken if taken > SLOW_MASK_SECONDS else 0.0
        self._reply(sequence, begun, pack_position(forced, mask[: self._mask_bytes]), matcher.get_error())

    @contextlib.contextmanager
    def _cpu_budget(self, slow: float, most: float) -> Iterator[None]:
        """The kernel sends SIGVTALRM after `slow` seconds of CPU time, and ends this process after `most`."""
        with self._lock:
            self._in_call = True
            if self.is_slow:
                self._tell(SLOW)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0 if self.is_slow else slow)
        signal.setitimer(signal.ITIMER_PROF, most)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            with self._lock:
                self._in_call = False
                if self.is_slow:
                    self._tell(DONE)

    def _reply(self, sequence: int, begun: float, data: bytes, error: str) -> None:
        cpu = min(2**32 - 1, int((time.process_time() - begun) * 1e6))
        # A quick call has not taken much memory.
        memory = max(0, _resident_kib() - self._resident_kib) if cpu > 10_000 else 0
        kind = ERROR if error else MASK
        if error:
            first_line = error.partition("\n")[0][:ERROR_CHARS].rstrip(".")
            if first_line.startswith("regex parse error") and (cause := REGEX_CAUSE.search(error)):
                first_line = f"in a regular expression, {cause[1]}"[:ERROR_CHARS]
            data = EXPLAINED.get(first_line, first_line).encode()
        self._connection.sendall(REPLY.pack(kind, sequence, cpu, memory, len(data)) + data)


def _compiled(tokenizer: LLTokenizer, source: str) -> tuple[LLMatcher | None, str]:
    try:
        matcher = LLMatcher(tokenizer, translated(source), log_level=0, limits=_limits())
    except RecursionError:
        return None, "the grammar is nested too deeply"
    except Exception as error:  # noqa: BLE001  GbnfToLarkError for a syntax error, and plain Exception for an undefined rule
        return None, str(error) or type(error).__name__
    problem = matcher.get_error()
    return (None, problem) if problem else (matcher, "")


def _error_after(compiled: LLMatcher, mask: bytes) -> str:
    """An error if a grammar cannot continue after its first mask, which most hostile ones show at once."""
    position = compiled.deep_copy()
    first = next((i * 8 + (bits & -bits).bit_length() - 1 for i, bits in enumerate(mask) if bits), None)
    if first is not None and not position.is_stopped():
        position.consume_token(first)
        position.compute_bitmask()
    return position.get_error()


def _limits() -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=ROW_ITEMS,
        initial_lexer_fuel=LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_ITEMS,
        max_lexer_states=LEXER_STATES,
        max_grammar_size=GRAMMAR_SYMBOLS,
        verbose_errors=False,
    )


def _lower_priority(thread: threading.Thread) -> None:
    number = thread.native_id if sys.platform == "linux" else None  # elsewhere, of the whole process
    os.setpriority(os.PRIO_PROCESS, number or 0, SLOW_NICE)


def _limit_resources() -> None:
    os.nice(NICE)
    with contextlib.suppress(AttributeError):  # only Linux has it; a stopped child must not outlive the worker
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGVTALRM})
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a failed allocation prints to it before it ends the process
    with contextlib.suppress(OSError, ValueError):  # only Linux says how much memory a process has mapped
        mapped = int(STATM.read_bytes().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, mapped + MEMORY_BYTES))


def _resident_kib() -> int:
    with contextlib.suppress(OSError):
        return int(STATM.read_bytes().split()[1]) * resource.getpagesize() // 1024
    return 0


if __name__ == "__main__":
    main()
