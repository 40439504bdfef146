"""Traffic to replay: which requests arrive when, and which prompts share which beginnings.

Three recorded formats are read, and recognised by how they begin. As JSON lines:

* conversation (Mooncake's): `timestamp` in ms, `input_length`, `output_length`, and `hash_ids`, one for each 512 tokens
  of the prompt. Equal ids mean equal prefixes up to there. Requests arrive at their times (open loop).
* sessions of agents: `s` is the session's name, `in` and `out` are tokens, `think` is the client's pause in seconds
  before the request, and `rl` are run lengths `[[first, count], ...]` of ids of 64-token blocks, different for each
  session. A session's next request arrives after its last answer (closed loop).

And a JSON list of chats (tau-bench's), each with its messages under `traj` or `messages`. Each answer was a request
with everything before it (closed loop, without pauses).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.simulator.chat_sessions import ChatSessionReader, MessagesError

CONVERSATION_BLOCK_TOKENS = 512
THINK_MAX_SECONDS = 300.0  # longer pauses are shortened to this by `staggered`


class TraceError(ValueError):
    """The trace is malformed. The message has the file and the line."""


class EnginePrompt(NamedTuple):
    """A prompt as its engine sees it, if that is known: its tokens, and the hashes of its full blocks."""

    tokens: int
    chain: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `blocks` are ranges of block hashes, as in a fingerprint.

    `after_seconds` counts from the session's last answer. It is not used for the first request. Without `engine`, the
    engine's blocks and tokens are those of the fingerprint.
    """

    after_seconds: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[range, ...]
    engine: EnginePrompt | None = None

    @property
    def chain(self) -> tuple[int, ...]:
        """The hashes of the prompt's full blocks, as in a fingerprint."""
        blocks: list[int] = []
        for several in self.blocks:
            blocks += several
        return tuple(blocks[: self.prompt_tokens // BLOCK_TOKENS])


@dataclass(frozen=True, slots=True)
class TraceSession:
    """Requests that are sent one after another, each after the answer to the one before."""

    name: str
    starts_at_seconds: float
    requests: Sequence[TraceRequest]
    urgent: bool = True  # real-time; else batch


@dataclass(frozen=True, slots=True)
class TrafficTrace:
    """A named set of sessions."""

    name: str
    sessions: Sequence[TraceSession]
    closed_loop: bool
    concurrency: int | None = None  # sessions at a time: another one begins when one ends, in their order
    answers_repeat: bool = True  # whether a session's next prompt repeats the answer that the engine gave

    @property
    def requests(self) -> int:
        """The number of requests of all sessions."""
        return sum(len(session.requests) for session in self.sessions)

    @property
    def prompt_tokens(self) -> int:
        """The prompt tokens of all requests."""
        return sum(request.prompt_tokens for session in self.sessions for request in session.requests)

    @property
    def duration_seconds(self) -> float:
        """When the last session begins: in an open loop, the duration of all arrivals."""
        return max(session.starts_at_seconds for session in self.sessions)


def read_trace(path: Path) -> TrafficTrace:
    """Read a trace in one of the formats above. Raises `TraceError` and `OSError`."""
    with path.open(encoding="utf-8") as file:
        is_list = file.read(1) == "["
        file.seek(0)
        if is_list:
            return _read_chats(path, file)
        rows = list(_read_rows(path, file))
    if not rows:
        raise TraceError(f"{path}: the trace is empty")
    read = _read_conversations if "hash_ids" in rows[0][1] else _read_agents
    try:
        return read(path.stem, rows)
    except _RowError as error:
        raise TraceError(f"{path}:{error.line}: {error}") from None


def _read_chats(path: Path, file: TextIO) -> TrafficTrace:
    try:
        recorded = json.load(file)
        reader = ChatSessionReader()
        sessions = [
            TraceSession(str(number), 0.0, requests)
            for number, session in enumerate(recorded)
            if (requests := [TraceRequest(0.0, *request) for request in reader.read_session(number, session)])
        ]
    except MessagesError as error:
        raise TraceError(f"{path}: {error}") from None
    except ValueError as error:
        raise TraceError(f"{path}: not JSON: {error}") from None
    if not sessions:
        raise TraceError(f"{path}: it contains no assistant message")
    return TrafficTrace(path.stem, sessions, closed_loop=True)


class _RowError(ValueError):
    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


Row = tuple[int, dict[str, Any]]


def _read_rows(path: Path, lines: Iterable[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise TraceError(f"{path}:{number}: not a JSON object")
        yield number, row


def _whole_number(line: int, row: dict[str, Any], name: str, least: int = 0) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _RowError(line, f"{name}: a whole number of at least {least} is needed, not {value!r}")
    return value


def _read_conversations(name: str, rows: Sequence[Row]) -> TrafficTrace:
    sessions = []
    blocks_per_id = CONVERSATION_BLOCK_TOKENS // BLOCK_TOKENS
    for line, row in rows:
        ids = row.get("hash_ids")
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            raise _RowError(line, "hash_ids: a list of whole numbers is needed")
        request = TraceRequest(
            after_seconds=0.0,
            prompt_tokens=_whole_number(line, row, "input_length", 1),
            output_tokens=_whole_number(line, row, "output_length"),
            blocks=tuple(range(i * blocks_per_id, (i + 1) * blocks_per_id) for i in ids),
        )
        at = _whole_number(line, row, "timestamp") / 1000
        sessions.append(TraceSession(str(line), at, (request,)))
    return TrafficTrace(name, sorted(sessions, key=lambda session: session.starts_at_seconds), closed_loop=False)


def _read_agents(name: str, rows: Sequence[Row]) -> TrafficTrace:
    by_session: dict[str, list[TraceRequest]] = {}
    first_ids: dict[str, int] = {}  # equal ids in different sessions stand for different prefixes
    largest = max((first + count for line, row in rows for first, count in _run_lengths(line, row)), default=0)
    for line, row in rows:
        session = row.get("s")
        if not isinstance(session, str):
            raise _RowError(line, "s: the name of a session is needed")
        requests = by_session.setdefault(session, [])
        first_id = first_ids.setdefault(session, len(first_ids) * (largest + 1))
        requests.append(
            TraceRequest(
                after_seconds=max(0.0, float(row.get("think") or 0.0)),
                prompt_tokens=_whole_number(line, row, "in", 1),
                output_tokens=_whole_number(line, row, "out"),
                blocks=tuple(
                    range(first_id + first, first_id + first + count) for first, count in _run_lengths(line, row)
                ),
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
    """The trace's sessions in random order, starting at random times; by default all of them.

    The pauses between starts have an exponential distribution with mean `start_every_seconds`. One session in
    `urgent_every` is real-time and the others are batch; if None, all are batch. Pauses of clients are at most
    `THINK_MAX_SECONDS`.
    """
    rng = random.Random(seed)
    chosen = list(trace.sessions)
    rng.shuffle(chosen)
    at, started = 0.0, []
    for number, session in enumerate(chosen[:sessions]):
        requests = [
            replace(request, after_seconds=min(request.after_seconds, THINK_MAX_SECONDS))
            for request in session.requests[:max_requests]
        ]
        urgent = urgent_every is not None and number % urgent_every == urgent_every - 1
        started.append(TraceSession(session.name, at, requests, urgent))
        at += rng.expovariate(1 / start_every_seconds)
    return replace(trace, sessions=started)
