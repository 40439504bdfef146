"""Compares a sample of the calls with the best earlier call of the same application, and records what broke the prefix.

An application is a key and the client program that uses it. The best earlier call is the one that shares most of this
one's parts, by their digests. Usually that is the turn before, whatever has changed in it; without any common part, it
is the application's latest call. All of this happens after the response. If the diagnosis is off, it costs one look at
the policy.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from gateway.core.money import atoms_to_text
from gateway.diagnosis.breaks import PrefixBreak, find_break
from gateway.diagnosis.journal import CallSummary, DiagnosisJournal, PartRow
from gateway.diagnosis.outline import CallOutline, PromptPart, first_user_digest, parts_of
from gateway.types import Attempt, Call, Operation, PhaseTimings, Usage

MAX_OUTLINES = 4096
MAX_OUTLINES_BYTES = 32 * 2**20
MAX_PART_ROWS = 32
MAX_AGENT_CHARACTERS = 80
NO_AGENT = "unknown"

Application = tuple[str, str, str, str]  # tenant, key, program, model
Headers = Mapping[bytes, bytes]


class PrefixDiagnosis:
    """The diagnosis of one gateway. Memory is bounded. Owned by the event loop."""

    def __init__(self, journal: DiagnosisJournal) -> None:
        self._journal = journal
        self._outlines: OrderedDict[str, tuple[Application, CallOutline]] = OrderedDict()  # by call id
        self._bytes = 0
        # The id of the latest call with a part, by the part's digest.
        self._latest_with_part: dict[tuple[Application, int], str] = {}
        self._latest: dict[Application, str] = {}  # bounded by the outlines, as is the mapping above

    def note(
        self, call: Call, headers: Headers, usage: Usage, timings: PhaseTimings, deployment: str | None,
        attempts: Sequence[Attempt],
    ) -> None:  # fmt: skip
        """A call was answered: compare it and write its summary, if its conversation is in the sample. Never raises."""
        config = call.policy.diagnosis
        if not config.sample or call.operation is not Operation.CHAT or deployment is None:
            return
        try:
            parts = parts_of(call)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):  # not the shape of a chat
            return
        if (first_user_digest(parts) & 0xFFFF_FFFF) / 2**32 >= config.sample:
            return
        application = (call.principal.tenant.name, call.principal.key_id, _client_program(headers), call.model.name)
        outline = CallOutline(call.id, parts, timings.ended_ns, deployment, usage)
        earlier = self._best_match(application, parts)
        broken = find_break(earlier, outline, content=config.content) if earlier is not None else None
        self._remember(application, outline, earlier)
        self._journal.append(_summary(call, application, outline, earlier, broken, timings, attempts))

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    def _best_match(self, application: Application, parts: Sequence[PromptPart]) -> CallOutline | None:
        """The earlier call of the application that shares most tokens with these parts, else its latest call."""
        shared_tokens: Counter[str] = Counter()
        for part in parts:
            latest = self._latest_with_part.get((application, part.digest))
            if latest is not None:
                shared_tokens[latest] += part.tokens
        best = shared_tokens.most_common(1)[0][0] if shared_tokens else self._latest.get(application)
        return self._outlines[best][1] if best is not None else None

    def _remember(self, application: Application, outline: CallOutline, earlier: CallOutline | None) -> None:
        """Remember the call for comparisons, and forget the oldest ones if there are too many."""
        # A call that continues an earlier one replaces it: nothing is only in the earlier one.
        if earlier is not None and outline.parts[: len(earlier.parts)] == earlier.parts:
            self._forget(earlier.call_id)
        self._outlines[outline.call_id] = (application, outline)
        self._bytes += outline.bytes
        self._latest[application] = outline.call_id
        for part in outline.parts:
            self._latest_with_part[application, part.digest] = outline.call_id
        while len(self._outlines) > 1 and (len(self._outlines) > MAX_OUTLINES or self._bytes > MAX_OUTLINES_BYTES):
            self._forget(next(iter(self._outlines)))

    def _forget(self, call_id: str) -> None:
        application, outline = self._outlines.pop(call_id)
        self._bytes -= outline.bytes
        for part in outline.parts:
            if self._latest_with_part.get((application, part.digest)) == call_id:
                del self._latest_with_part[application, part.digest]
        if self._latest.get(application) == call_id:
            del self._latest[application]


def _client_program(headers: Headers) -> str:
    """The first product of a user-agent, which does not contain what differs between machines."""
    words = headers.get(b"user-agent", b"").decode("latin-1").split()
    return words[0][:MAX_AGENT_CHARACTERS] if words else NO_AGENT


def _summary(
    call: Call, application: Application, outline: CallOutline, earlier: CallOutline | None, broken: PrefixBreak | None,
    timings: PhaseTimings, attempts: Sequence[Attempt],
) -> CallSummary:  # fmt: skip
    tenant, key_id, agent, model = application
    usage = outline.usage
    cost, currency = _lost_cost(call, outline, broken, timings)
    return CallSummary(
        time=datetime.fromtimestamp(timings.ended_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
        call_id=call.id,
        tenant=tenant,
        key_id=key_id,
        agent=agent,
        model=model,
        deployment=outline.deployment,
        sample=call.policy.diagnosis.sample,
        level=call.policy.canonicalise.form_for(tenant, model).level,
        prompt_tokens=usage.input,
        cached_tokens=usage.cache_read,
        exact=usage.exact,
        parts=tuple(PartRow(p.role, p.tokens, f"{p.digest:016x}") for p in outline.parts[:MAX_PART_ROWS]),
        parts_in_all=len(outline.parts),
        broken=broken,
        against=earlier.call_id if earlier is not None else None,
        lost_seconds=_lost_seconds(call, outline, broken, timings, attempts),
        lost_cost=cost,
        currency=currency,
    )


def _lost_seconds(
    call: Call, outline: CallOutline, broken: PrefixBreak | None, timings: PhaseTimings, attempts: Sequence[Attempt]
) -> float | None:
    """How long it took to compute the lost tokens.

    For a stream, their share of the time to the first chunk; otherwise by the policy's prefill rate of the deployment.
    """
    if broken is None:
        return None
    computed = outline.usage.input_uncached + outline.usage.cache_write
    sent_ns = next((a.started_ns for a in reversed(attempts) if a.deployment == outline.deployment), 0)
    if call.stream and sent_ns and computed and timings.first_chunk_ns > sent_ns:
        return round((timings.first_chunk_ns - sent_ns) / 1e9 * min(1.0, broken.lost_tokens / computed), 6)
    deployment = call.policy.deployments_by_name.get(outline.deployment or "")
    return round(broken.lost_tokens / deployment.prefill_tokens_per_second, 6) if deployment is not None else None


def _lost_cost(
    call: Call, outline: CallOutline, broken: PrefixBreak | None, timings: PhaseTimings
) -> tuple[str | None, str | None]:
    """What the lost tokens cost more than cached ones, and the currency."""
    prices = call.policy.price_lists.get((call.model.name, outline.deployment or ""))
    price = prices.price(call.class_name, call.service_tier, timings.started_ns) if prices is not None else None
    if broken is None or price is None:
        return None, None
    return atoms_to_text(broken.lost_tokens * (price.atoms.input - price.atoms.cached_input)), price.currency
