"""File of samples of the engines' own token counters: `<ledger>/<replica>/engine-counters.jsonl`.

Each line is one sample: the counters of one deployment at one moment. An engine's counters grow as long as it runs. The
difference between two samples is the number of tokens that the engine processed in between, for all of its clients.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec

from gateway.billing.ledger.unreadable import UnreadableRow, warn_of_unreadable
from gateway.types import TokenCounters

FILE = "engine-counters.jsonl"
_SECOND = len("2026-11-20T10:00:00")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class CounterSample(msgspec.Struct, frozen=True):
    """A deployment's token counters at one moment."""

    at: str  # RFC 3339, as in receipts
    deployment: str
    model: str
    input: Count
    output: Count
    unwanted: Count = 0  # output tokens that the engine computed but did not send in any answer


class CounterInterval(msgspec.Struct, frozen=True):
    """The tokens that an engine processed between two samples. Excludes output that is not part of any answer.

    `restarted` is true if the counters restarted from zero between the samples. The tokens counted between the first
    sample and the restart are then missing.
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


def append_samples(folder: Path, samples: Iterable[CounterSample]) -> None:
    """Append samples to the file in `folder`. Creates the folder if necessary. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("ab") as file:
        file.write(b"".join(_encode(sample) + b"\n" for sample in samples))


def read_samples(ledger: Path, *, set_aside: list[UnreadableRow] | None = None) -> list[CounterSample]:
    """Read the samples of all replicas, in order of time.

    Unreadable samples are omitted and appended to `set_aside`; without a list, they are logged.
    """
    samples, unreadable = [], list[UnreadableRow]()
    for file in ledger.glob(f"*/{FILE}"):
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            try:
                samples.append(_decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                unreadable.append(UnreadableRow(file, number, str(error)))
    if set_aside is None:
        warn_of_unreadable(unreadable)
    else:
        set_aside += unreadable
    return sorted(samples, key=lambda sample: sample.at)


def intervals(
    samples: Iterable[CounterSample], since: str | None = None, until: str | None = None
) -> list[CounterInterval]:
    """Return the intervals between consecutive samples of each deployment, if both samples lie in the period.

    If a deployment has several samples in one second, only the last one counts. That happens if several gateways
    sample on the hour.
    """
    by_deployment: dict[str, list[CounterSample]] = {}
    for sample in samples:
        if (since is None or sample.at >= since) and (until is None or sample.at <= until):
            own = by_deployment.setdefault(sample.deployment, [])
            if own and own[-1].at[:_SECOND] == sample.at[:_SECOND]:
                own.pop()
            own.append(sample)
    return [_interval(first, second) for own in by_deployment.values() for first, second in pairwise(own)]


def _interval(first: CounterSample, second: CounterSample) -> CounterInterval:
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


def _counters(sample: CounterSample) -> TokenCounters:
    return TokenCounters(sample.input, sample.output, sample.unwanted)
