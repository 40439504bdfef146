"""Compares a sample of the calls with the best earlier call of the same application, and records what broke the prefix.

An application is a key and the client program that uses it. The best earlier call is the one that shares most of this
one's parts, by their digests. Usually that is the turn before, whatever has changed in it; without any common part, it
is the application's latest call. For parts with the same lines, their order does not count.

All of this happens after the response and in a thread of its own, because parsing a long prompt several times would
delay other requests. If the diagnosis is off, it costs one look at the policy.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import msgspec

from gateway.core.money import atoms_to_text
from gateway.diagnosis.breaks import PrefixBreak, find_break
from gateway.diagnosis.candidate_forms import CandidateForms
from gateway.diagnosis.journal import CallSummary, DiagnosisJournal, PartRow
from gateway.diagnosis.outline import CallOutline, PromptPart, first_user_digest, parts_of
from gateway.types import Attempt, Call, Operation, PhaseTimings, Usage

MAX_OUTLINES = 4096
MAX_OUTLINES_BYTES = 32 * 2**20
MAX_PART_ROWS = 32
MAX_AGENT_CHARACTERS = 80
MAX_WAITING = 256  # calls that wait for the thread; further ones are not diagnosed
MAX_WAITING_BYTES = 32 * 2**20  # of their prompts
NO_AGENT = "unknown"

Application = tuple[str, str, str, str]  # tenant, key, program, model
Headers = Mapping[bytes, bytes]

log = logging.getLogger("warmpath")


class _Answered(msgspec.Struct, frozen=True):
    """A call that was answered, as `note` got it."""

    call: Call
    application: Application
    usage: Usage
    timings: PhaseTimings
    deployment: str
    attempts: Sequence[Attempt]
    cache_tokens: int

    @property
    def bytes(self) -> int:
        return sum(len(self.call.fields.get(name, b"")) for name in ("messages", "tools"))


class PrefixDiagnosis:
    """The diagnosis of one gateway. Memory is bounded. `note` and `close` are called on the event loop."""

    def __init__(self, journal: DiagnosisJournal, cache_tokens: Callable[[str], int | None] = lambda _: None) -> None:
        """`cache_tokens` returns the estimated capacity of a deployment's cache, in tokens.

        For a deployment that it does not know, the policy's first guess is recorded.
        """
        self.calls_skipped = 0  # because too many waited
        self._cache_tokens = cache_tokens
        self._thread: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._waiting = self._waiting_bytes = 0  # both are changed under the lock
        # What follows belongs to the thread.
        self._journal = journal
        self._forms = CandidateForms()
        self._outlines: OrderedDict[str, tuple[Application, CallOutline]] = OrderedDict()  # by call id
        self._bytes = 0
        # The id of the latest call with a part, by the part's digest and its `unordered` ones.
        self._latest_with_part: dict[tuple[Application, int], str] = {}
        self._latest: dict[Application, str] = {}  # bounded by the outlines, as is the mapping above

    def note(
        self, call: Call, headers: Headers, usage: Usage, timings: PhaseTimings, deployment: str | None,
        attempts: Sequence[Attempt],
    ) -> None:  # fmt: skip
        """A call was answered: compare it and write its summary, if its conversation is in the sample. Never raises."""
        if not call.policy.diagnosis.sample or call.operation is not Operation.CHAT or deployment is None:
            return
        application = (call.principal.tenant_name, call.principal.key_id, _client_program(headers), call.model_name)
        configured = call.policy.deployment(deployment)
        cache_tokens = self._cache_tokens(deployment) or (configured.cache_tokens if configured is not None else 0)
        answered = _Answered(call, application, usage, timings, deployment, tuple(attempts), cache_tokens)
        with self._lock:
            if self._waiting >= MAX_WAITING or self._waiting_bytes + answered.bytes > MAX_WAITING_BYTES:
                if not self.calls_skipped:
                    log.warning("the diagnosis cannot keep up: some calls are not compared; lower `diagnosis.sample`")
                self.calls_skipped += 1
                return
            self._waiting += 1
            self._waiting_bytes += answered.bytes
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="diagnosis")
        self._thread.submit(self._diagnose, answered)

    def flush(self) -> None:
        """Wait until all noted calls are in the journal."""
        if self._thread is not None:
            self._thread.submit(lambda: None).result()

    def _diagnose(self, answered: _Answered) -> None:
        try:
            self._compare(answered)
        except Exception:  # a bug must not end the thread's work on other calls
            log.exception("a call could not be diagnosed", extra={"call_id": answered.call.id})
        finally:
            with self._lock:
                self._waiting -= 1
                self._waiting_bytes -= answered.bytes

    def _compare(self, answered: _Answered) -> None:
        call, application, config = answered.call, answered.application, answered.call.policy.diagnosis
        try:
            parts = parts_of(call)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):  # not the shape of a chat
            return
        if (first_user_digest(parts) & 0xFFFF_FFFF) / 2**32 >= config.sample:
            return
        outline = CallOutline(call.id, parts, answered.timings.ended_ns, answered.deployment, answered.usage)
        earlier = self._best_match(application, parts)
        broken = find_break(earlier, outline, content=config.content) if earlier is not None else None
        self._remember(application, outline, earlier)
        chain, forms = self._forms.chains(call, parts)
        self._journal.append(_summary(answered, outline, earlier, broken, chain, forms))

    def close(self) -> None:
        """Finish the noted calls, at most `MAX_WAITING`, and close the journal. Safe to call twice."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._journal.close()

    def _best_match(self, application: Application, parts: Sequence[PromptPart]) -> CallOutline | None:
        """The earlier call of the application that shares most tokens with these parts, else its latest call."""
        shared_tokens: Counter[str] = Counter()
        for part in parts:
            known = (self._latest_with_part.get((application, digest)) for digest in (part.digest, *part.unordered))
            if (latest := next(filter(None, known), None)) is not None:
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
        for digest in _digests(outline):
            self._latest_with_part[application, digest] = outline.call_id
        while len(self._outlines) > 1 and (len(self._outlines) > MAX_OUTLINES or self._bytes > MAX_OUTLINES_BYTES):
            self._forget(next(iter(self._outlines)))

    def _forget(self, call_id: str) -> None:
        application, outline = self._outlines.pop(call_id)
        self._bytes -= outline.bytes
        for digest in _digests(outline):
            if self._latest_with_part.get((application, digest)) == call_id:
                del self._latest_with_part[application, digest]
        if self._latest.get(application) == call_id:
            del self._latest[application]


def _client_program(headers: Headers) -> str:
    """The first product of a user-agent, which does not contain what differs between machines."""
    words = headers.get(b"user-agent", b"").decode("latin-1").split()
    return words[0][:MAX_AGENT_CHARACTERS] if words else NO_AGENT


def _digests(outline: CallOutline) -> set[int]:
    return {digest for part in outline.parts for digest in (part.digest, *part.unordered)}


def _summary(
    answered: _Answered, outline: CallOutline, earlier: CallOutline | None, broken: PrefixBreak | None, chain: str,
    forms: dict[str, str],
) -> CallSummary:  # fmt: skip
    call, timings, usage = answered.call, answered.timings, answered.usage
    tenant, key_id, agent, model = answered.application
    form = call.policy.canonicalise.form_for(tenant, model)
    miss_atoms, currency = _miss_cost(answered)
    return CallSummary(
        time=datetime.fromtimestamp(timings.ended_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
        call_id=call.id,
        tenant=tenant,
        key_id=key_id,
        agent=agent,
        model=model,
        deployment=outline.deployment,
        sample=call.policy.diagnosis.sample,
        level=form.level,
        opt_in=form.opt_in,
        prompt_tokens=usage.input,
        cached_tokens=usage.cache_read,
        exact=usage.exact,
        parts=tuple(PartRow(p.role, p.tokens, f"{p.digest:016x}") for p in outline.parts[:MAX_PART_ROWS]),
        parts_in_all=len(outline.parts),
        broken=broken,
        against=earlier.call_id if earlier is not None else None,
        lost_seconds=_lost_seconds(call, outline, broken, timings, answered.attempts),
        lost_cost=None if broken is None or miss_atoms is None else atoms_to_text(broken.lost_tokens * miss_atoms),
        currency=currency,
        chain=chain,
        forms=forms,
        cache_tokens=answered.cache_tokens,
        miss_cost=None if miss_atoms is None else atoms_to_text(miss_atoms),
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
    deployment = call.policy.deployment(outline.deployment or "")
    return round(broken.lost_tokens / deployment.prefill_tokens_per_second, 6) if deployment is not None else None


def _miss_cost(answered: _Answered) -> tuple[int | None, str | None]:
    """What a computed token costs more than a cached one, in atoms, and the currency."""
    call, timings = answered.call, answered.timings
    prices = call.policy.prices_of(call.model_name, answered.deployment)
    price = prices.price(call.class_name, call.service_tier, timings.started_ns) if prices is not None else None
    return (None, None) if price is None else (price.atoms.input - price.atoms.cached_input, price.currency)
