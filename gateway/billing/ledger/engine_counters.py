"""What engines themselves have counted, noted beside the ledger: `<ledger>/<replica>/engine-counters.jsonl`.

A line is a mark: the counters of one deployment at one moment. They grow for as long as a server lives; between two
marks they say what it has done, whoever asked it to.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import msgspec

from gateway.types import TokenCounters

FILE = "engine-counters.jsonl"
_SECOND = len("2026-11-20T10:00:00")


class CounterSample(msgspec.Struct, frozen=True):
    at: str  # RFC 3339, as in receipts
    deployment: str
    model: str
    input: int
    output: int
    unwanted: int = 0  # of the output, what is in no answer


class CounterInterval(msgspec.Struct, frozen=True):
    """What an engine did from one mark to the next, but for output that is in no answer. `restarted`: its counters
    began anew meanwhile, and what they had counted since the first mark is lost.
    """

    deployment: str
    model: str
    since: str
    until: str
    input: int
    output: int
    restarted: bool


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(CounterSample).decode


def append_samples(folder: Path, marks: Iterable[CounterSample]) -> None:
    """Append to the file in `folder`, which is made. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("ab") as file:
        file.write(b"".join(_encode(mark) + b"\n" for mark in marks))


def read_samples(ledger: Path) -> list[CounterSample]:
    """Of all replicas, in the order of time. Raises `ValueError`, which names the file and the line."""
    marks = []
    for file in ledger.glob(f"*/{FILE}"):
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            try:
                marks.append(_decode(line))
            except msgspec.MsgspecError as error:
                raise ValueError(f"{file}:{number}: {error}") from error
    return sorted(marks, key=lambda mark: mark.at)


def intervals(
    marks: Iterable[CounterSample], since: str | None = None, until: str | None = None
) -> list[CounterInterval]:
    """By deployment, between neighbouring marks that both lie within the period. Of those of one second, which several
    gateways note on the hour, the last one stands.
    """
    by_deployment: dict[str, list[CounterSample]] = {}
    for mark in marks:
        if (since is None or mark.at >= since) and (until is None or mark.at <= until):
            own = by_deployment.setdefault(mark.deployment, [])
            if own and own[-1].at[:_SECOND] == mark.at[:_SECOND]:
                own.pop()
            own.append(mark)
    return [_span(first, second) for own in by_deployment.values() for first, second in pairwise(own)]


def _span(first: CounterSample, second: CounterSample) -> CounterInterval:
    now, then = _counters(second), _counters(first)
    restarted = min(now.since(then)) < 0
    counted = now if restarted else now.since(then)
    return CounterInterval(
        deployment=second.deployment,
        model=second.model,
        since=first.at,
        until=second.at,
        input=counted.input,
        output=counted.output - counted.unwanted,
        restarted=restarted,
    )


def _counters(mark: CounterSample) -> TokenCounters:
    return TokenCounters(mark.input, mark.output, mark.unwanted)
