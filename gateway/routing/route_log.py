"""Logs routing decisions with their outcomes, if the policy says so: `routing: {log: true}`.

A row has a call's candidates, the best ones first, what was predicted of them, and what the chosen one then reported
and how long it took. It contains no text of the prompt. Rows are written when calls end, to two files of
`MAX_FILE_BYTES` (`gateway/core/bounded_log.py`). `warmpath route-log` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from gateway.core.bounded_log import BoundedLog, read_rows
from gateway.routing.base import Candidate
from gateway.routing.upstream import Upstream
from gateway.types import Call

MAX_FILE_BYTES = 16 * 2**20  # some 30,000 calls
CANDIDATES_MAX = 8  # in a row


class CandidateRow(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate, as it was predicted. Tokens are estimates from the text's length."""

    deployment: str
    cost_seconds: float  # what the strategy ranked it by
    ttft_seconds: float  # predicted time to the first chunk
    cached_tokens: int
    queued_tokens: int
    in_flight: int


class RouteRow(msgspec.Struct, frozen=True, kw_only=True):
    """One answered call. What is unknown is None."""

    time: str  # RFC 3339, at the call's end
    call_id: str
    tenant: str
    model: str
    latency_class: str
    prompt_tokens: int  # estimated
    candidates: tuple[CandidateRow, ...]  # the first `CANDIDATES_MAX`
    candidates_in_all: int
    deployment: str  # that answered; not always the first candidate, which may have failed or been full
    ttft_seconds: float | None  # from sending to the first chunk; None without streaming
    predicted_cached_tokens: int  # in the engine's tokens
    reported_prompt_tokens: int | None
    reported_cached_tokens: int | None
    prefill: str | None = None  # the prefill deployment that computed the prompt


_encode = msgspec.json.encode
_row = msgspec.json.Decoder(RouteRow)


class RouteLog:
    """The log of one gateway process. Owned by the event loop."""

    def __init__(self, folder: Path, replica: str, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._log = BoundedLog(folder, replica, what="the route log", max_file_bytes=max_file_bytes)

    def record(self, call: Call, candidates: Sequence[Candidate], upstream: Upstream) -> None:
        """Write the decision for a call, which has ended at this upstream. Never raises."""
        sent = upstream.sent
        prompt, usage = sent.prompt, sent.usage
        row = RouteRow(
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            call_id=call.id,
            tenant=call.principal.tenant_name,
            model=call.model_name,
            latency_class=call.class_name,
            prompt_tokens=call.prompt_tokens_estimate,
            candidates=tuple(map(_candidate_row, candidates[:CANDIDATES_MAX])),
            candidates_in_all=len(candidates),
            deployment=upstream.deployment.name,
            ttft_seconds=round(prompt.first_chunk_at - prompt.sent_at, 4) if prompt.streams else None,
            predicted_cached_tokens=sent.predicted_cached_tokens,
            reported_prompt_tokens=None if usage is None else usage[1],
            reported_cached_tokens=None if usage is None else usage[2],
            prefill=_prefill_of(upstream.chosen),
        )
        self._log.append(_encode(row))


def _prefill_of(chosen: Candidate) -> str | None:
    source = chosen.block_source
    return None if source is None or chosen.kv_transfer is None else source.deployment.name


def _candidate_row(candidate: Candidate) -> CandidateRow:
    return CandidateRow(
        deployment=candidate.deployment.name,
        cost_seconds=round(candidate.cost_seconds, 4),
        ttft_seconds=round(candidate.ttft_seconds, 4),
        cached_tokens=candidate.matched_tokens,
        queued_tokens=round(candidate.queued_tokens),
        in_flight=candidate.in_flight,
    )


def read_routes(folder: Path) -> Iterator[RouteRow]:
    """The rows of all gateways below this folder, each gateway's oldest first. Malformed lines are skipped."""
    for line in read_rows(folder):
        try:
            yield _row.decode(line)
        except msgspec.MsgspecError:
            continue
