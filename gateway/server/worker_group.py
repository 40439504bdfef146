"""The worker processes of one gateway: identifies this worker, and merges metrics and recent calls of all workers.

Any worker may get a scrape. That worker queries the other workers over Unix sockets, which the supervisor has made and
no other user can connect to. A query is one line. The answer is everything up to the end of the connection:

  metrics TYPE    the worker's metrics as text of this content type
  calls QUERY     its recent calls that match the query

In the merged metrics each series has a label `worker`. A worker that does not answer has `warmpath_worker_up` 0 and no
other series. Sums over the label equal what a single process would show.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ANSWER_SECONDS = 1.0  # for one question and its answer
ANSWER_MAX_BYTES = 16 * 2**20
QUESTION_MAX_BYTES = 1024
END_OF_OPENMETRICS = b"# EOF\n"


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Says which of `count` workers this is. If there are several, each has a socket in `folder`.

    The socket stays when the worker is restarted.
    """

    number: int = 0
    count: int = 1
    folder: Path = Path()
    listener: socket.socket | None = None

    def name(self, replica: str) -> str:
        """Return the worker's own replica name, which its ledger chain and leases have. Stable across restarts."""
        return replica if self.count == 1 else worker_name(replica, self.number)

    def share_of(self, slots: int) -> int:
        """This worker's share of a deployment's slots, at least one. The shares add up to the whole if it is at least
        the number of workers."""
        whole, rest = divmod(slots, self.count)
        return max(1, whole + (self.number < rest))


SINGLE_WORKER = WorkerIdentity()


def worker_name(replica: str, number: int) -> str:
    return f"{replica}.w{number}"


def left_behind(ledger: Path, replica: str, worker: WorkerIdentity) -> list[str]:
    """Return the ledger chains of this gateway's workers that no longer exist after the number of workers changed."""
    if not ledger.is_dir():
        return []
    now = {worker.name(replica)} | {worker_name(replica, n) for n in range(worker.count) if worker.count > 1}
    ours = [folder.name for folder in ledger.iterdir() if folder.is_dir() and _is_of(folder.name, replica)]
    return sorted(set(ours) - now)


def _is_of(name: str, replica: str) -> bool:
    return name == replica or (name.startswith(f"{replica}.w") and name.removeprefix(f"{replica}.w").isdigit())


class WorkerGroup:
    """Queries the other workers. Between `start` and `stop`, also answers their queries."""

    def __init__(
        self, worker: WorkerIdentity, *, metrics: Callable[[str], bytes], calls: Callable[[bytes], bytes]
    ) -> None:
        self._worker = worker
        self._own_metrics = metrics
        self._own_calls = calls
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        if self._worker.listener is not None:
            self._server = await asyncio.start_unix_server(
                self._answer_question, sock=self._worker.listener, limit=QUESTION_MAX_BYTES
            )

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def metrics(self, own: bytes, content_type: str) -> bytes:
        """Return the metrics of all workers as text. `own` has this worker's metrics, as text of `content_type`."""
        if self._worker.count == 1:
            return own
        question = b"metrics %b\n" % content_type.encode()
        return merged({**await self._ask_other_workers(question), self._worker.number: own})

    async def calls(self, wanted: bytes) -> dict[int, bytes | None]:
        """The recent calls of each worker that match `wanted`; None for a worker that does not answer.

        `wanted` is opaque here and must not contain a line break.
        """
        answers = await self._ask_other_workers(b"calls %b\n" % wanted)
        return {**answers, self._worker.number: self._own_calls(wanted)}

    async def _answer_question(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(ANSWER_SECONDS):
                question = await reader.readline()  # ValueError: the line is too long
                writer.write(self._answer(question))
                await writer.drain()

    def _answer(self, question: bytes) -> bytes:
        match question.strip().partition(b" "):
            case [b"metrics", _, content_type]:
                return self._own_metrics(content_type.decode())
            case [b"calls", _, wanted]:
                return self._own_calls(wanted)
            case _:
                return b""

    async def _ask_other_workers(self, question: bytes) -> dict[int, bytes | None]:
        others = [number for number in range(self._worker.count) if number != self._worker.number]
        answers = await asyncio.gather(*(self._ask(number, question) for number in others))
        return dict(zip(others, answers, strict=True))

    async def _ask(self, number: int, question: bytes) -> bytes | None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                reader, writer = await asyncio.open_unix_connection(socket_path(self._worker.folder, number))
                with contextlib.closing(writer):
                    writer.write(question)
                    text = bytearray()
                    while part := await reader.read(ANSWER_MAX_BYTES):
                        text += part
                        if len(text) > ANSWER_MAX_BYTES:
                            return None
                    return bytes(text) or None
        except (OSError, TimeoutError):
            return None


def socket_path(folder: Path, number: int) -> Path:
    return folder / str(number)


def merged(texts: dict[int, bytes | None]) -> bytes:
    """Merge the metrics of all workers. Each metric family appears once, with the series of all workers."""
    is_openmetrics = any(text is not None and text.endswith(END_OF_OPENMETRICS) for text in texts.values())
    heads: dict[bytes, list[bytes]] = {}
    series: dict[bytes, list[bytes]] = {}
    for number, text in sorted(texts.items()):
        label = b'worker="%d"' % number
        for family, lines in _families((text or b"").removesuffix(END_OF_OPENMETRICS)):
            known = heads.setdefault(family, [])
            known += [line for line in lines if line.startswith(b"#")] if family not in series else []
            labelled = [_with_label(line, label) for line in lines if not line.startswith(b"#")]
            series.setdefault(family, []).extend(labelled)
    up = [b'warmpath_worker_up{worker="%d"} %d' % (number, text is not None) for number, text in sorted(texts.items())]
    head = [b"# HELP warmpath_worker_up 1 if the worker answered this scrape.", b"# TYPE warmpath_worker_up gauge"]
    lines = [line for family, known in heads.items() for line in (*known, *series[family])]
    return b"\n".join([*lines, *head, *up]) + b"\n" + (END_OF_OPENMETRICS if is_openmetrics else b"")


def _families(text: bytes) -> Iterable[tuple[bytes, list[bytes]]]:
    """Yield the name and the lines of each metric family."""
    family, lines = b"", list[bytes]()
    for line in text.splitlines():
        if line.startswith(b"# HELP "):
            if lines:
                yield family, lines
            family, lines = line.split(b" ", 3)[2], []
        lines.append(line)
    if lines:
        yield family, lines


def _with_label(line: bytes, label: bytes) -> bytes:
    name, brace, labels = line.partition(b"{")
    if brace:
        return name + b"{" + label + b"," + labels
    name, _, value = line.partition(b" ")
    return name + b"{" + label + b"} " + value


__all__ = ["SINGLE_WORKER", "WorkerGroup", "WorkerIdentity", "left_behind", "merged", "socket_path", "worker_name"]
