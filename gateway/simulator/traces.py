"""Traffic to replay: who asks for what, when, and which prompts share which beginnings.

Three recorded formats are read, told apart by how they begin. Of JSON lines:

* conversation (Mooncake's): `timestamp` in ms, `input_length`, `output_length`, and `hash_ids`, one for each 512 tokens
  of the prompt, where equal ids mean equal prefixes up to there. Requests come at their times (open loop).
* sessions of agents: `s` names the session, `in` and `out` tokens, `think` seconds of the client before the request,
  and `rl`, run lengths `[[first, count], ...]` of ids of 64-token blocks, each session with its own. A session's next
  request comes after its last answer (closed loop).

And a JSON list of chats (tau-bench's): each with its messages under `traj` or `messages`, of which every answer was a
request with all that stands before it (closed loop; nobody thinks).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.simulator.chat_sessions import ChatSessionReader, MessagesError

CONVERSATION_BLOCK_TOKENS = 512
THINK_MAX_SECONDS = 300.0


class TraceError(ValueError):
    """A trace that can not be read: says the file and the line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`blocks` are ranges of block hashes; `after_seconds` counts from the trace's start, or from the last answer."""

    after_seconds: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[range, ...]

    @property
    def chain(self) -> tuple[int, ...]:
        """The prompt's full blocks, as a fingerprint has them."""
        blocks: list[int] = []
        for several in self.blocks:
            blocks += several
        return tuple(blocks[: self.prompt_tokens // BLOCK_TOKENS])


@dataclass(frozen=True, slots=True)
class TraceSession:
    """Requests of which each waits for the one before it. One that stands alone has nothing to wait for."""

    name: str
    starts_at_seconds: float
    requests: Sequence[TraceRequest]
    urgent: bool = True  # real-time; else batch


@dataclass(frozen=True, slots=True)
class TrafficTrace:
    name: str
    sessions: Sequence[TraceSession]
    closed_loop: bool

    @property
    def requests(self) -> int:
        return sum(len(session.requests) for session in self.sessions)

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for session in self.sessions for request in session.requests)

    @property
    def duration_seconds(self) -> float:
        """Of arrivals in an open loop."""
        return max(session.starts_at_seconds for session in self.sessions)


def read_trace(path: Path) -> TrafficTrace:
    """Raises `TraceError`, and `OSError`."""
    with path.open(encoding="utf-8") as file:
        is_list = file.read(1) == "["
        file.seek(0)
        if is_list:
            return _chats(path, file)
        rows = list(_rows(path, file))
    if not rows:
        raise TraceError(f"{path}: the trace is empty")
    read = _conversation if "hash_ids" in rows[0][1] else _agents
    try:
        return read(path.stem, rows)
    except _RowError as problem:
        raise TraceError(f"{path}:{problem.line}: {problem}") from None


def _chats(path: Path, file: TextIO) -> TrafficTrace:
    try:
        recorded = json.load(file)
        turns = ChatSessionReader()
        sessions = [
            TraceSession(str(number), 0.0, requests)
            for number, session in enumerate(recorded)
            if (requests := [TraceRequest(0.0, *request) for request in turns.of(number, session)])
        ]
    except MessagesError as problem:
        raise TraceError(f"{path}: {problem}") from None
    except ValueError as problem:
        raise TraceError(f"{path}: not JSON: {problem}") from None
    if not sessions:
        raise TraceError(f"{path}: nobody answers in it")
    return TrafficTrace(path.stem, sessions, closed_loop=True)


class _RowError(ValueError):
    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


Row = tuple[int, dict[str, Any]]


def _rows(path: Path, lines: Iterable[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as problem:
            raise TraceError(f"{path}:{number}: not JSON: {problem}") from None
        if not isinstance(row, dict):
            raise TraceError(f"{path}:{number}: not a JSON object")
        yield number, row


def _count(line: int, row: dict[str, Any], name: str, least: int = 0) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _RowError(line, f"{name}: a whole number of at least {least} is needed, not {value!r}")
    return value


def _conversation(name: str, rows: Sequence[Row]) -> TrafficTrace:
    sessions = []
    pieces = CONVERSATION_BLOCK_TOKENS // BLOCK_TOKENS
    for line, row in rows:
        ids = row.get("hash_ids")
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            raise _RowError(line, "hash_ids: a list of whole numbers is needed")
        request = TraceRequest(
            after_seconds=0.0,
            prompt_tokens=_count(line, row, "input_length", 1),
            output_tokens=_count(line, row, "output_length"),
            blocks=tuple(range(i * pieces, (i + 1) * pieces) for i in ids),
        )
        at = _count(line, row, "timestamp") / 1000
        sessions.append(TraceSession(str(line), at, (request,)))
    return TrafficTrace(name, sorted(sessions, key=lambda session: session.starts_at_seconds), closed_loop=False)


def _agents(name: str, rows: Sequence[Row]) -> TrafficTrace:
    by_session: dict[str, list[TraceRequest]] = {}
    bases: dict[str, int] = {}  # ids of different sessions stand for different prefixes
    largest = max((first + count for line, row in rows for first, count in _run_lengths(line, row)), default=0)
    for line, row in rows:
        session = row.get("s")
        if not isinstance(session, str):
            raise _RowError(line, "s: the name of a session is needed")
        requests = by_session.setdefault(session, [])
        base = bases.setdefault(session, len(bases) * (largest + 1))
        requests.append(
            TraceRequest(
                after_seconds=max(0.0, float(row.get("think") or 0.0)),
                prompt_tokens=_count(line, row, "in", 1),
                output_tokens=_count(line, row, "out"),
                blocks=tuple(range(base + first, base + first + count) for first, count in _run_lengths(line, row)),
            )
        )
    return TrafficTrace(name, [TraceSession(s, 0.0, requests) for s, requests in by_session.items()], closed_loop=True)


def _run_lengths(line: int, row: dict[str, Any]) -> list[tuple[int, int]]:
    runs = row.get("rl")
    try:
        pairs = [(int(first), int(count)) for first, count in runs]  # type: ignore[union-attr]
    except (TypeError, ValueError):
        raise _RowError(line, "rl: a list of [first, count] is needed") from None
    return pairs


def staggered(
    trace: TrafficTrace,
    *,
    seed: int,
    sessions: int | None = None,
    start_every_seconds: float = 20.0,
    max_requests: int | None = None,
    urgent_every: int | None = None,
) -> TrafficTrace:
    """Sessions in random order, beginning at random times; one in `urgent_every` is real-time, the others are batch
    (None: all are batch). Think times are capped at `THINK_MAX_SECONDS`."""
    rng = random.Random(seed)
    chosen = list(trace.sessions)
    rng.shuffle(chosen)
    at, begun = 0.0, []
    for number, session in enumerate(chosen[:sessions]):
        requests = [
            replace(request, after_seconds=min(request.after_seconds, THINK_MAX_SECONDS))
            for request in session.requests[:max_requests]
        ]
        urgent = urgent_every is not None and number % urgent_every == urgent_every - 1
        begun.append(TraceSession(session.name, at, requests, urgent))
        at += rng.expovariate(1 / start_every_seconds)
    return replace(trace, sessions=begun)
