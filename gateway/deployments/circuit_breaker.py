"""Circuit breaker for one deployment: closed, open, half-open. Counts only failures that the deployment caused.

    closed      requests are sent
    resting     closed, but other deployments go first: it has just failed, or a health check failed. If it named a
                time itself (`Retry-After`), no request is sent until then
    open        it failed `FAILURES_TO_OPEN` times in a row, or half of its last `WINDOW` requests: no request is sent
                until its pause is over. The pause doubles with each opening
    half-open   the pause is over: one request at a time probes it, and its outcome decides

The caller attributes failures (`evidence.py`). Connections that fail, and responses that do not arrive, are cut or are
malformed, count as the deployment's. An error answer counts only if the evidence says so (`convicted`). Until then it
is `suspected`: other deployments go first, and the breaker stays as it is. A deployment that begins every response and
completes none is as bad as one that begins none, but looks better: no other deployment can answer any more, and its
slots are soon free again. So a cut response revokes the success of its beginning, and after an opening the breaker
trusts a deployment again only when a response completes.

A refused request, a client that disconnects and a client's own deadline say nothing about the deployment, and do not
count. Times are event-loop seconds. Nothing here waits or needs a timer.
"""

from __future__ import annotations

from collections import deque

STATES = ("closed", "resting", "open", "half_open")
FAILURES_TO_OPEN = 5
WINDOW = 20  # newest outcomes that `OPEN_SHARE` applies to
OPEN_SHARE = 0.5
PAUSE_FIRST_SECONDS = 0.5
PAUSE_MAX_SECONDS = 30.0
REST_MAX_SECONDS = 120.0  # upper bound on a deployment's own `Retry-After`
SLOW_START_SECONDS = 10.0
SLOW_START_SHARE = 0.1  # of its slots, right after it closed


class CircuitBreaker:
    """The breaker of one deployment. Owned by the event loop.

    Call `admit` before each request, then exactly one of `succeeded`, `failed`, `suspected` and `abandoned`. After
    `suspected`, call `convicted` if the deployment turns out to be at fault. After `succeeded`, call `completed` or
    `answer_broken`, or neither if the client disconnected.
    """

    __slots__ = (
        "_broken_answers_in_a_row",
        "_failures_in_a_row",
        "_no_probe_until",
        "_openings_in_a_row",
        "_outcomes",
        "_probing",
        "_unproven",
        "deprioritised_until",
        "next_try_at",
        "open",
        "recovered_at",
    )  # fmt: skip

    def __init__(self) -> None:
        self.next_try_at = 0.0  # no request is sent before
        self.deprioritised_until = 0.0  # until then, other deployments go first
        self._no_probe_until = 0.0  # set by `Retry-After` and ejections; a good health check does not shorten it
        self.open = False  # or half-open, if it is true; only this class sets it
        self._probing = False
        self._failures_in_a_row = 0
        self._broken_answers_in_a_row = 0
        self._openings_in_a_row = 0  # since a response last completed while it was closed
        self._unproven = False  # it closed because a response began, and none has completed since
        self._outcomes: deque[bool] = deque(maxlen=WINDOW)
        self.recovered_at: float | None = None  # when it closed, until `slot_share` is 1 again

    def state(self, now: float) -> str:
        """One of `STATES`."""
        if self.open:
            return "half_open" if self._probing or now >= self.next_try_at else "open"
        return "resting" if self.is_deprioritised(now) else "closed"

    def is_deprioritised(self, now: float) -> bool:
        """Whether other deployments should go first."""
        return now < self.deprioritised_until or now < self.next_try_at

    def admit(self, now: float) -> bool:
        """Whether a request may be sent now. If the breaker is half-open, that request becomes its probe."""
        if now < self.next_try_at or self._probing:
            return False
        if self.open:
            self._probing = True
        return True

    def would_admit(self, now: float) -> bool:
        """As `admit`, without taking the probe."""
        return now >= self.next_try_at and not self._probing

    def succeeded(self, now: float) -> None:
        """A response has begun. Closes the breaker, unless it has to stay open until a named time."""
        self._failures_in_a_row = 0
        if self.open and now >= self._no_probe_until:
            self.recovered_at = now
            self._outcomes.clear()
            self.open = self._probing = False
            self._unproven = True
            self.next_try_at = 0.0
        self.deprioritised_until = 0.0
        self._outcomes.append(True)

    def failed(self, now: float) -> None:
        """A request failed by the deployment's fault. May open the breaker."""
        self._failures_in_a_row += 1
        self._outcomes.append(False)
        self.deprioritised_until = max(self.deprioritised_until, now + PAUSE_FIRST_SECONDS)
        if self.open and not self._probing:
            return  # a request that was in flight when the breaker opened
        if self._probing or self._failures_in_a_row >= FAILURES_TO_OPEN or self._fails_often():
            self._open_for_a_pause(now)

    def suspected(self, now: float) -> None:
        """A request failed, and it is not known who is at fault. If it was a probe, the next one follows soon."""
        self.deprioritised_until = max(self.deprioritised_until, now + PAUSE_FIRST_SECONDS)
        if self._probing:
            self._probing = False
            self.next_try_at = max(self.next_try_at, now + PAUSE_FIRST_SECONDS)

    def convicted(self, now: float, *, was_probe: bool = False) -> None:
        """A suspected failure was the deployment's fault. May open the breaker."""
        if was_probe and self.open:
            self._probing = True  # so that the pause doubles, as after a failed probe
        self.failed(now)

    def convicted_by_many(self, now: float) -> None:
        """Distinct requests failed, and none succeeds: open the breaker for the shortest pause."""
        self.deprioritised_until = max(self.deprioritised_until, now + PAUSE_FIRST_SECONDS)
        self._openings_in_a_row = 0
        self._open_for_a_pause(now)

    def completed(self) -> None:
        """A response that had begun is complete."""
        self._broken_answers_in_a_row = 0
        if not self.open:
            self._unproven, self._openings_in_a_row = False, 0

    def answer_broken(self, now: float) -> None:
        """A response that had begun broke off by the deployment's fault. May open the breaker.

        A good health check does not end the pause that follows: health checks were good all the time.
        """
        self._broken_answers_in_a_row += 1
        if True in self._outcomes:
            # The response's beginning counted as a success; it becomes a failure.
            self._outcomes.remove(True)
            self._outcomes.append(False)
        self.deprioritised_until = max(self.deprioritised_until, now + PAUSE_FIRST_SECONDS)
        if not self.open and (
            self._unproven or self._broken_answers_in_a_row >= FAILURES_TO_OPEN or self._fails_often()
        ):
            self._open_for_a_pause(now)
            self._keep_open_until(self.next_try_at)

    def _fails_often(self) -> bool:
        return len(self._outcomes) == WINDOW and self._outcomes.count(False) >= OPEN_SHARE * WINDOW

    def _open_for_a_pause(self, now: float) -> None:
        pause = min(PAUSE_FIRST_SECONDS * (1 << min(self._openings_in_a_row, 10)), PAUSE_MAX_SECONDS)
        self.open, self._probing = True, False
        self._openings_in_a_row += 1
        self.recovered_at = None
        self.next_try_at = max(self.next_try_at, now + pause)

    def abandoned(self) -> None:
        """The request ended for reasons of its caller. Nothing is learned, and the next request may be the probe."""
        self._probing = False

    def rest(self, now: float, seconds: float) -> None:
        """The deployment asked for a pause (429, or 503 with `Retry-After`). That is not a failure."""
        self._probing = False
        self._keep_open_until(now + min(seconds, REST_MAX_SECONDS))
        self.deprioritised_until = max(self.deprioritised_until, self.next_try_at)

    def wait_until(self, until: float) -> None:
        """Send no further request before this time, because the limits of the deployment's plan are used up."""
        self.next_try_at = max(self.next_try_at, until)

    def deprioritise(self, now: float, seconds: float) -> None:
        """A health check failed: other deployments go first for a while. The breaker stays closed."""
        self.deprioritised_until = max(self.deprioritised_until, now + seconds)

    def eject(self, now: float, seconds: float) -> None:
        """Open the breaker for a time: the deployment is far slower than its peers, or wrongly configured."""
        self.open, self._probing = True, False
        self.recovered_at = None
        self._keep_open_until(now + seconds)

    def end_ejection(self) -> None:
        """The reason for an ejection may be gone: let the next request probe the deployment."""
        self._no_probe_until = self.next_try_at = 0.0

    def _keep_open_until(self, until: float) -> None:
        self._no_probe_until = max(self._no_probe_until, until)
        self.next_try_at = max(self.next_try_at, until)

    def allow_probe(self, now: float) -> None:
        """A health check succeeded: become half-open as soon as no named time forbids it."""
        if self.open and self.next_try_at > now:
            self.next_try_at = max(now, self._no_probe_until)

    def slot_share(self, now: float) -> float:
        """The share of its slots that may be used: 1, or less during the slow start after it was open."""
        if self.recovered_at is None:
            return 1.0
        age = now - self.recovered_at
        if age >= SLOW_START_SECONDS:
            self.recovered_at = None
            return 1.0
        return SLOW_START_SHARE + (1 - SLOW_START_SHARE) * age / SLOW_START_SECONDS
