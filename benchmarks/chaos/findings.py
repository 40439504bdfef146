"""The checks at the end of a run, and its table."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.chaos.calls import Ending
from benchmarks.chaos.watch import Growth
from benchmarks.ledger_faults import listed, open_attempts, rows_of
from gateway.billing.ledger import verify
from gateway.billing.ledger.compaction import read_lines
from gateway.billing.ledger.rows import OpenCall
from tests.e2e.processes import PATIENCE_SECONDS, Running

FAULTS_SHOWN = 20
DIFFERING_SHOWN = 10
# No scripted answer has more tokens than this, so a receipt with more has taken over absurd usage.
BELIEVABLE_TOKENS = 20_000


@dataclass
class Findings:
    """What happened, and what was found at the end. `problems` is empty if all checks hold."""

    seed: int
    seconds: float = 0.0
    innocent: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    hostile: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    faults: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)  # innocent calls that did not end as they must
    unnamed: list[str] = field(default_factory=list)  # replies to hostile clients that name no cause, or are wrong
    problems: list[str] = field(default_factory=list)
    tokens: dict[str, tuple[int, int]] = field(default_factory=dict)  # by engine: of the ledgers, and its own count
    tapped: int = 0  # receipts of the killed engine that were compared with what it said
    receipts: Counter[str] = field(default_factory=Counter)  # by outcome
    growth: list[Growth] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not (self.problems or self.refused or self.unnamed)

    def note_innocent(self, kind: str, ending: Ending) -> None:
        self.innocent[kind.split(" ")[0]][ending.what] += 1
        if ending.fault:
            self.refused.append(f"{kind} {ending.call_id}: {ending.fault}")
            print(f"{time.strftime('%H:%M:%S')} refused: {self.refused[-1]}", flush=True)

    def note_hostile(self, kind: str, ending: Ending) -> None:
        self.hostile[kind][ending.what] += 1
        if ending.fault:
            self.unnamed.append(f"{kind}: {ending.fault}")
            print(f"{time.strftime('%H:%M:%S')} wrong reply: {self.unnamed[-1]}", flush=True)

    def lines(self) -> Iterator[str]:
        calls, visits = (sum(map(Counter.total, each.values())) for each in (self.innocent, self.hostile))
        yield f"seed {self.seed}, {self.seconds:.0f} s: {calls} innocent calls, {visits} visits of hostile clients"
        yield from self.notes
        yield f"faults: {listed(self.faults)}"
        yield "innocent calls:"
        yield from (f"  {kind:22} {listed(ends)}" for kind, ends in sorted(self.innocent.items()))
        yield "hostile clients:"
        yield from (f"  {kind:22} {listed(ends)}" for kind, ends in sorted(self.hostile.items()))
        yield f"receipts: {listed(self.receipts)}"
        for name, (ledger, own) in self.tokens.items():
            yield f"tokens at engine {name}: {ledger} in the ledgers, {own} by its own count"
        yield f"receipts of the killed engine that equal what it said: {self.tapped}"
        yield from (f"{'flat' if growth.flat else 'GROWN'}: {growth}" for growth in self.growth)
        yield f"innocent calls refused: {len(self.refused)}"
        yield from (f"  {each}" for each in self.refused[:FAULTS_SHOWN])
        yield f"refusals without a cause, and other wrong replies: {len(self.unnamed)}"
        yield from (f"  {each}" for each in self.unnamed[:FAULTS_SHOWN])
        yield from (f"PROBLEM: {each}" for each in self.problems[:FAULTS_SHOWN])
        yield "all checks passed" if self.good else "CHECKS FAILED"


def examine(ledger: Path, engines: Mapping[str, Running], tapped: Mapping[str, tuple[int, int]], to: Findings) -> None:
    """Compare the ledgers with the engines, and check what the ledgers say."""
    tokens, calls, events = Counter[str](), Counter[str](), Counter[str]()
    attempts: dict[tuple[str, str], list[OpenCall]] = defaultdict(list)
    for row in rows_of(ledger):
        events[row.event_id] += 1
        match type(row).__struct_config__.tag:
            case "opened":
                attempts[row.call_id, row.deployment].append(row)
            case "unbilled":
                tokens[row.deployment] += _total(row)
            case "receipt":
                calls[row.call_id] += 1
                to.receipts[row.outcome] += 1
                if row.source != "cache":
                    tokens[row.deployment] += _total(row)
                _compare_with_tap(row, attempts[row.call_id, row.deployment], tapped, to)
                if _total(row) > BELIEVABLE_TOKENS:
                    to.problems.append(f"{row.call_id} at {row.deployment} is billed for {_total(row)} tokens")
    for name, engine in engines.items():
        own = int(engine.metric("vllm:prompt_tokens_total") + engine.metric("vllm:generation_tokens_total"))
        to.tokens[name] = tokens[name], own
        if tokens[name] != own:
            to.problems.append(f"the ledgers have {tokens[name]} tokens of engine {name}, which counts {own}")
            to.problems += islice(_differing_calls(ledger, name, engine), DIFFERING_SHOWN)
    for what, counts in (("event ids", events), ("calls with a receipt", calls)):
        if twice := [each for each, count in counts.items() if count > 1]:
            to.problems.append(f"{what} that occur twice: {twice[:5]}")
    if left := open_attempts(ledger):
        to.problems.append(f"{left} attempts are still open")
    verified = verify(ledger, read_lines)
    if verified.broken or verified.unreadable:
        to.problems.append(f"the chains do not verify: {verified.broken or verified.unreadable}")


def _differing_calls(ledger: Path, name: str, engine: Running) -> Iterator[str]:
    """The calls for which the ledgers and the engine's own records differ. The engine keeps records for an hour."""
    ids: dict[str, list[str]] = defaultdict(list)
    rows: dict[str, list[Any]] = defaultdict(list)
    for row in rows_of(ledger):
        if getattr(row, "deployment", None) != name:
            continue
        if isinstance(row, OpenCall):
            ids[row.call_id].append(row.request_id)
        elif getattr(row, "source", "") != "cache":
            rows[row.call_id].append(row)
    with httpx2.Client(base_url=engine.url, timeout=PATIENCE_SECONDS) as client:
        for call_id in ids.keys() | rows.keys():
            replies = [client.get(f"/requests/{each}") for each in ids[call_id]]
            usages = [reply.json()["usage"] for reply in replies if reply.status_code == 200]
            own = sum(usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
            if own != (billed := sum(map(_total, rows[call_id]))):
                yield f"{call_id} has {billed} tokens in the ledgers, {own} by the engine: {rows[call_id]} {usages}"


def _total(row: Any) -> int:
    return int(row.input_uncached + row.cache_read + row.cache_write + row.output)


def _compare_with_tap(
    receipt: Any, opened: list[OpenCall], tapped: Mapping[str, tuple[int, int]], to: Findings
) -> None:
    """Compare a complete answer of the killed engine with the counts that it sent with it."""
    if receipt.deployment != "mortal" or receipt.outcome != "complete" or not receipt.exact or not opened:
        return
    said = tapped.get(opened[-1].request_id)
    if receipt.source == "cache" or said is None:
        return
    to.tapped += 1
    if sum(said) != _total(receipt):
        to.problems.append(f"{receipt.call_id} is billed for {_total(receipt)} tokens; the engine said {said}")
