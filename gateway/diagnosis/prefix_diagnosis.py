"""Compares a share of the calls with the best earlier one of the same application, and writes down what broke.

An application is a key and the program that uses it. The best earlier call is the one that has most of this one's
parts, found by their digests: the turn before, as a rule, whatever has changed in it; else the application's last.
All of it happens behind the reply. Off, it costs a look at the policy.
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
    def __init__(self, journal: DiagnosisJournal) -> None:
        self._journal = journal
        self._outlines: OrderedDict[str, tuple[Application, CallOutline]] = OrderedDict()  # by call id
        self._bytes = 0
        self._holders: dict[tuple[Application, int], str] = {}  # who was the last to have a part, by its digest
        self._last: dict[Application, str] = {}  # bounded by the outlines, as is what is above

    def note(
        self, call: Call, headers: Headers, usage: Usage, timings: PhaseTimings, deployment: str | None,
        attempts: Sequence[Attempt],
    ) -> None:  # fmt: skip
        """A call has been answered. Never raises, and keeps nothing of one that is not in the sample."""
        wanted = call.policy.diagnosis
        if not wanted.sample or call.operation is not Operation.CHAT or deployment is None:
            return
        try:
            parts = parts_of(call)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):  # of no shape that can be compared
            return
        if (first_user_digest(parts) & 0xFFFF_FFFF) / 2**32 >= wanted.sample:
            return
        application = (call.principal.tenant.name, call.principal.key_id, _agent(headers), call.model.name)
        new = CallOutline(call.id, parts, timings.ended_ns, deployment, usage)
        old = self._best(application, parts)
        broken = find_break(old, new, content=wanted.content) if old is not None else None
        self._keep(application, new, old)
        self._journal.append(_summary(call, application, new, old, broken, timings, attempts))

    def close(self) -> None:
        self._journal.close()

    def _best(self, application: Application, parts: Sequence[PromptPart]) -> CallOutline | None:
        votes: Counter[str] = Counter()
        for part in parts:
            holder = self._holders.get((application, part.digest))
            if holder is not None:
                votes[holder] += part.tokens
        best = votes.most_common(1)[0][0] if votes else self._last.get(application)
        return self._outlines[best][1] if best is not None else None

    def _keep(self, application: Application, new: CallOutline, old: CallOutline | None) -> None:
        if old is not None and new.parts[: len(old.parts)] == old.parts:  # it goes on: nothing is only in the old one
            self._drop(old.call_id)
        self._outlines[new.call_id] = (application, new)
        self._bytes += new.bytes
        self._last[application] = new.call_id
        for part in new.parts:
            self._holders[application, part.digest] = new.call_id
        while len(self._outlines) > 1 and (len(self._outlines) > MAX_OUTLINES or self._bytes > MAX_OUTLINES_BYTES):
            self._drop(next(iter(self._outlines)))

    def _drop(self, call_id: str) -> None:
        application, outline = self._outlines.pop(call_id)
        self._bytes -= outline.bytes
        for part in outline.parts:
            if self._holders.get((application, part.digest)) == call_id:
                del self._holders[application, part.digest]
        if self._last.get(application) == call_id:
            del self._last[application]


def _agent(headers: Headers) -> str:
    """The first product of a user-agent, without what differs from one machine to the next."""
    words = headers.get(b"user-agent", b"").decode("latin-1").split()
    return words[0][:MAX_AGENT_CHARACTERS] if words else NO_AGENT


def _summary(
    call: Call, application: Application, new: CallOutline, old: CallOutline | None, broken: PrefixBreak | None,
    timings: PhaseTimings, attempts: Sequence[Attempt],
) -> CallSummary:  # fmt: skip
    tenant, key_id, agent, model = application
    usage = new.usage
    cost, currency = _cost(call, new, broken, timings)
    return CallSummary(
        time=datetime.fromtimestamp(timings.ended_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
        call_id=call.id,
        tenant=tenant,
        key_id=key_id,
        agent=agent,
        model=model,
        deployment=new.deployment,
        sample=call.policy.diagnosis.sample,
        level=call.policy.canonicalise.form_for(tenant, model).level,
        prompt_tokens=usage.input,
        cached_tokens=usage.cache_read,
        exact=usage.exact,
        parts=tuple(PartRow(p.role, p.tokens, f"{p.digest:016x}") for p in new.parts[:MAX_PART_ROWS]),
        parts_in_all=len(new.parts),
        broken=broken,
        against=old.call_id if old is not None else None,
        lost_seconds=_seconds(call, new, broken, timings, attempts),
        lost_cost=cost,
        currency=currency,
    )


def _seconds(
    call: Call, new: CallOutline, broken: PrefixBreak | None, timings: PhaseTimings, attempts: Sequence[Attempt]
) -> float | None:
    """How long computing the lost tokens took: as part of the time to the first chunk where that can be seen, else at
    the speed that the policy gives the server."""
    if broken is None:
        return None
    computed = new.usage.input_uncached + new.usage.cache_write
    asked_ns = next((a.started_ns for a in reversed(attempts) if a.deployment == new.deployment), 0)
    if call.stream and asked_ns and computed and timings.first_chunk_ns > asked_ns:
        return round((timings.first_chunk_ns - asked_ns) / 1e9 * min(1.0, broken.lost_tokens / computed), 6)
    deployment = call.policy.deployments_by_name.get(new.deployment or "")
    return round(broken.lost_tokens / deployment.prefill_tokens_per_second, 6) if deployment is not None else None


def _cost(
    call: Call, new: CallOutline, broken: PrefixBreak | None, timings: PhaseTimings
) -> tuple[str | None, str | None]:
    """What the lost tokens cost more than cached ones would have."""
    prices = call.policy.price_lists.get((call.model.name, new.deployment or ""))
    price = prices.price(call.class_name, call.service_tier, timings.started_ns) if prices is not None else None
    if broken is None or price is None:
        return None, None
    return atoms_to_text(broken.lost_tokens * (price.atoms.input - price.atoms.cached_input)), price.currency
