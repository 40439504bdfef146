"""Evidence about failures: decides whether the deployment, the request, or the pair of both is at fault.

A request is known by its fingerprint (`fingerprint_of`), whichever tenant sent it. The rules:

1. **An error answer (5xx, or an error event) speaks against the request if other requests succeed at the deployment
   meanwhile.** So does a repetition of an error that this request had there before, while other requests succeed. The
   circuit breaker does not count it. The router tries the request at one other deployment, and not at this one again.
2. **The same failure of distinct requests speaks against the deployment.** It is convicted if `DISTINCT_TO_CONVICT`
   requests fail there and no request has succeeded there for `STANDING_SECONDS`. A failure that is explained by
   neither rule stays open: other deployments go first, and no party is convicted.
3. **An error speaks against the deployment if another deployment then answers the same request.** The circuit breaker
   counts it.
4. **401, 402, 403, and 404 for the model or path that the gateway wrote** speak against the deployment: the policy or
   the server is configured wrongly. The deployment is ejected (`Ejections`), at first for a short time. A 403 while
   other requests succeed falls under rule 1, because firewalls and content filters answer with it.
5. **501 and "not supported"** speak against the pair of deployment and capability (`capabilities.py`).
6. **A crash** (the connection is lost and the health check fails) speaks against all requests that were in flight,
   until they succeed anywhere. A request is quarantined at its second crash if all requests that were in flight with it
   at both crashes have succeeded since; at its third crash in any case (`Quarantine`). If the deployment refused
   connections before, it was shutting down, and the lost connection is no crash.

What follows from the rules, whatever the mix of requests and deployments:

* The circuit breaker of a deployment that answers every innocent request is never opened by error answers within
  `STANDING_SECONDS` after such an answer. If it opens later, its pause stays at the shortest one.
* A request that every working deployment answers is refused for an error only after two deployments failed at it that
  answered other requests meanwhile. It is quarantined only after three crashes in `RECORD_SECONDS`, or after two in
  which it was the last one that has not succeeded since.

All tables are bounded in entries and time. Times are event-loop seconds. Owned by the event loop.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections import OrderedDict
from typing import TypeVar

from gateway.types import Call

DISTINCT_TO_CONVICT = 5  # requests that fail without a success, at which the deployment is convicted
STANDING_SECONDS = 10.0  # after a success, in which error answers do not convict the deployment
ENTRIES_MAX = 256  # failed requests that are remembered for each deployment
ENTRY_SECONDS = 600.0

EJECTION_FIRST_SECONDS = 5.0  # doubles with each failed probe
EJECTION_MAX_SECONDS = 60.0

RECORDS_MAX = 1000  # requests with crashes
RECORD_SECONDS = 600.0  # after its last crash, a request's crashes are forgotten
QUARANTINE_FIRST_SECONDS = 60.0  # doubles with each further crash, up to RECORD_SECONDS
CRASHES_TO_BLOCK = 2
CRASHES_TO_BLOCK_ALWAYS = 3  # even if other requests were in flight each time and have not succeeded since
SAME_CRASH_SECONDS = 5.0  # within which lost connections of one deployment have one cause
SHUTDOWN_MARGIN_SECONDS = 1.0  # a connection that was refused later than this before a cut may be due to a crash
UPDATES_MAX = 100  # per message to peers, so per tenth of a second

# Fields that do not change what an engine computes.
_IDENTITY_FIELDS = frozenset(
    {"model", "user", "safety_identifier", "metadata", "store", "prompt_cache_key", "service_tier"}
)


def fingerprint_of(call: Call) -> int:
    """64 bits that identify a request by what an engine computes, for all tenants alike.

    A cryptographic hash: no other request can be constructed with the fingerprint of a given one.
    """
    digest = hashlib.blake2b(f"{call.endpoint_name}\n{call.model_name}".encode(), digest_size=8)
    for name in sorted(call.fields.keys() - _IDENTITY_FIELDS):
        value = bytes(call.fields[name])
        digest.update(b"\n%b %d\n" % (name.encode(), len(value)))
        digest.update(value)
    return int.from_bytes(digest.digest())


_Value = TypeVar("_Value")


class Verdict(enum.Enum):
    """Who is at fault for an error answer."""

    REQUEST = "request"
    DEPLOYMENT = "deployment"
    OPEN = "open"


class Evidence:
    """The evidence about one deployment: when requests succeeded there, and which requests failed."""

    __slots__ = ("_completed_at", "_failed", "_unexplained", "last_success_at", "refused_connection_at")

    def __init__(self) -> None:
        self.last_success_at = -math.inf  # when a response began or was completed
        self._completed_at = -math.inf  # when a response was completed
        self.refused_connection_at = -math.inf  # the first time since a success or a good health check
        self._failed: OrderedDict[int, float] = OrderedDict()  # by fingerprint: when it failed last
        self._unexplained: OrderedDict[int, float] = OrderedDict()  # those that failed since the last success

    def succeeded(self, now: float) -> None:
        """A response began, or was completed. It acquits the deployment of all errors that were unexplained."""
        self.last_success_at = now
        self.refused_connection_at = -math.inf
        if self._unexplained:
            self._unexplained.clear()

    def completed(self, now: float) -> None:
        """A response was completed."""
        self._completed_at = now
        self.succeeded(now)

    def refused_connection(self, now: float) -> None:
        """The deployment did not accept a connection, answered 503, or failed a health check."""
        if self.refused_connection_at == -math.inf:
            self.refused_connection_at = now

    def accepted_connection(self) -> None:
        """A health check succeeded."""
        self.refused_connection_at = -math.inf

    def has_standing(self, now: float) -> bool:
        """Whether requests have succeeded here recently."""
        return now - self.last_success_at < STANDING_SECONDS

    def is_repetition(self, fingerprint: int, now: float) -> bool:
        """Record a failure of any kind. True if the request failed here before, while others succeed."""
        return self._note_failure(fingerprint, now) and self.has_standing(now)

    def acquits_of_break(self, fingerprint: int, began_at: float, now: float, *, reported: bool) -> bool:
        """Whether a response that began at `began_at` and broke off speaks against its request only.

        As rule 1, but only completed responses acquit, since this one began, too. `reported` means that the deployment
        reported an error. Otherwise the connection broke, which one request must do twice to be at fault.
        """
        repeated = self._note_failure(fingerprint, now)
        if reported and self._completed_at >= began_at:
            return True
        return repeated and now - self._completed_at < STANDING_SECONDS

    def _note_failure(self, fingerprint: int, now: float) -> bool:
        before = self._failed.get(fingerprint, -math.inf)
        _put(self._failed, fingerprint, now, ENTRIES_MAX)
        return now - before < ENTRY_SECONDS

    def judge_error(self, fingerprint: int, sent_at: float, now: float) -> Verdict:
        """Record an error answer to a request that was sent at `sent_at`, and judge it by rules 1 and 2."""
        repeated = self.is_repetition(fingerprint, now)
        if repeated or self.last_success_at >= sent_at:
            return Verdict.REQUEST
        _put(self._unexplained, fingerprint, now, ENTRIES_MAX)
        if not self.has_standing(now) and self._count_unexplained(now) >= DISTINCT_TO_CONVICT:
            self._unexplained.clear()
            return Verdict.DEPLOYMENT
        return Verdict.OPEN

    def _count_unexplained(self, now: float) -> int:
        while self._unexplained and now - next(iter(self._unexplained.values())) >= ENTRY_SECONDS:
            self._unexplained.popitem(last=False)
        return len(self._unexplained)

    def was_shutting_down(self, sent_at: float, cut_at: float) -> bool:
        """Whether the deployment refused connections between a request that it accepted and the cut of its response."""
        return sent_at <= self.refused_connection_at <= cut_at - SHUTDOWN_MARGIN_SECONDS


class Ejections:
    """Why and for how long a deployment is ejected for a wrong configuration (rule 4)."""

    __slots__ = ("_in_a_row", "reason")

    def __init__(self) -> None:
        self.reason = ""  # empty if the deployment is not ejected; contains no text of clients or servers
        self._in_a_row = 0

    def eject(self, reason: str) -> float:
        """Record one more answer that speaks for a wrong configuration. Returns the seconds of the ejection."""
        self.reason = reason
        self._in_a_row += 1
        return min(EJECTION_FIRST_SECONDS * (1 << min(self._in_a_row - 1, 10)), EJECTION_MAX_SECONDS)

    def end(self) -> None:
        """The deployment answered a request, or its configuration changed."""
        self.reason, self._in_a_row = "", 0


class _Crash:
    """One crash of one deployment, and the requests in flight then that have not succeeded since."""

    __slots__ = ("last_at", "remaining")

    def __init__(self) -> None:
        self.last_at = -math.inf
        self.remaining: set[int] = set()


class _Record:
    """The crashes of one request."""

    __slots__ = ("blocked_until", "crashes", "until")

    def __init__(self) -> None:
        self.crashes: list[_Crash] = []  # at most CRASHES_TO_BLOCK_ALWAYS
        self.until = 0.0
        self.blocked_until = 0.0


class Quarantine:
    """Requests that were in flight at crashes (rule 6). Updates are sent to peers, and theirs are applied.

    Deployments are identified by a number that is the same at all gateways, and requests by their fingerprint.
    """

    def __init__(self) -> None:
        self.records: OrderedDict[int, _Record] = OrderedDict()  # by fingerprint
        self._crashes: OrderedDict[int, _Crash] = OrderedDict()  # by deployment: the newest
        self._updates: dict[tuple[int, int], None] = {}  # (fingerprint, deployment), or (fingerprint, 0): succeeded

    def __len__(self) -> int:
        return len(self.records)

    def crashed(self, fingerprint: int, deployment: int, now: float) -> None:
        """A deployment crashed while this request was in flight there."""
        self._apply_crash(fingerprint, deployment, now)
        self._note_update(fingerprint, deployment)

    def succeeded(self, fingerprint: int) -> None:
        """The request was answered completely: forget its crashes, which speak against the others more."""
        if self._forget(fingerprint):
            self._note_update(fingerprint, 0)

    def receive(self, fingerprint: int, deployment: int, now: float) -> None:
        """Apply a peer's update, which may be about a crash that this gateway noticed, too."""
        if deployment:
            self._apply_crash(fingerprint, deployment, now)
        else:
            self._forget(fingerprint)

    def is_blocked(self, fingerprint: int, now: float) -> bool:
        """Whether the request must be refused."""
        record = self.records.get(fingerprint)
        if record is None or now >= record.blocked_until:
            return False
        if len(record.crashes) >= CRASHES_TO_BLOCK_ALWAYS:
            return True
        return all(crash.remaining <= {fingerprint} for crash in record.crashes)

    def take_updates(self) -> tuple[tuple[int, int], ...]:
        """The changes since the last call, as pairs of fingerprint and deployment; deployment 0: it succeeded."""
        updates, self._updates = tuple(self._updates), {}
        return updates

    def _apply_crash(self, fingerprint: int, deployment: int, now: float) -> None:
        crash = self._crashes.get(deployment)
        if crash is None or now - crash.last_at >= SAME_CRASH_SECONDS:
            crash = _Crash()
            _put(self._crashes, deployment, crash, RECORDS_MAX)
        crash.last_at = now
        if len(crash.remaining) < RECORDS_MAX:
            crash.remaining.add(fingerprint)
        record = self.records.get(fingerprint)
        if record is None or now >= record.until:
            record = _Record()
        record.until = now + RECORD_SECONDS
        if crash not in record.crashes:
            record.crashes = [*record.crashes, crash][-CRASHES_TO_BLOCK_ALWAYS:]
            if (more := len(record.crashes) - CRASHES_TO_BLOCK) >= 0:
                record.blocked_until = now + min(QUARANTINE_FIRST_SECONDS * (1 << more), RECORD_SECONDS)
        _put(self.records, fingerprint, record, RECORDS_MAX)

    def _forget(self, fingerprint: int) -> bool:
        record = self.records.pop(fingerprint, None)
        for crash in record.crashes if record is not None else ():
            crash.remaining.discard(fingerprint)
        return record is not None

    def _note_update(self, fingerprint: int, deployment: int) -> None:
        if len(self._updates) < UPDATES_MAX:
            self._updates[fingerprint, deployment] = None


def _put(table: OrderedDict[int, _Value], key: int, value: _Value, maximum: int) -> None:
    """Set an entry as the newest one, and drop the oldest beyond `maximum`."""
    table[key] = value
    table.move_to_end(key)
    while len(table) > maximum:
        table.popitem(last=False)
