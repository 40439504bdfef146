"""Whether a server is to be asked: a circuit breaker that counts only what is the server's own fault.

    closed      it is asked
    resting     it named a time (`Retry-After`), or has just failed: others go first, and until a time that it named
                itself it is not asked at all
    open        it failed `FAILURES_TO_OPEN` times in a row, or half of its last `WINDOW` calls: it is not asked until
                its pause is over, which doubles each time
    half-open   the pause is over: one call at a time tries it, and decides

Faults are attributed by the caller: connections that fail, 5xx, answers that do not come, come cut or are no answers.
A server that begins every answer and ends none is as bad as one that begins none, and looks better: nothing can be
tried elsewhere any more, and its places are soon free again. So an answer that breaks off takes its good beginning
back, and a server that was open is trusted again once an answer has come whole, not before.

A refused request, a client that leaves and a client's own deadline say nothing about the server, and do not count.
Times are event-loop seconds; nothing here waits, and nothing needs a timer.
"""

from __future__ import annotations

from collections import deque

STATES = ("closed", "resting", "open", "half_open")
FAILURES_TO_OPEN = 5
WINDOW = 20  # of the last outcomes
OPEN_SHARE = 0.5
PAUSE_FIRST_SECONDS = 0.5
PAUSE_MAX_SECONDS = 30.0
REST_MAX_SECONDS = 120.0  # of a server's own `Retry-After`: who asks for longer is tried again then
SLOW_START_SECONDS = 10.0
SLOW_START_SHARE = 0.1  # of its places, at first


class CircuitBreaker:
    """One server's. `allows` before asking it, then exactly one of `succeeded`, `failed`, `abandoned`; behind the
    first of these `completed` or `broke_off`, or neither where its client left."""

    __slots__ = (
        "_broken_in_a_row",
        "_in_a_row",
        "_no_probe_until",
        "_open",
        "_openings",
        "_outcomes",
        "_probing",
        "_recovered_at",
        "_unproven",
        "deprioritised_until",
        "next_try_at",
    )  # fmt: skip

    def __init__(self) -> None:
        self.next_try_at = 0.0  # when it may be asked again
        self.deprioritised_until = 0.0  # until then it is asked after all others
        self._no_probe_until = 0.0  # as it asked for, or as it was ejected: no sign of life shortens that
        self._open = False
        self._probing = False
        self._in_a_row = 0
        self._broken_in_a_row = 0
        self._openings = 0  # since it was well
        self._unproven = False  # it has begun to answer again, and no answer has come whole yet
        self._outcomes: deque[bool] = deque(maxlen=WINDOW)
        self._recovered_at: float | None = None

    @property
    def open(self) -> bool:
        return self._open

    @property
    def in_slow_start(self) -> bool:
        """Whether `share` may be less than all."""
        return self._recovered_at is not None

    def state(self, now: float) -> str:
        """One of `STATES`."""
        if self._open:
            return "half_open" if self._probing or now >= self.next_try_at else "open"
        return "resting" if self.is_deprioritised(now) else "closed"

    def is_deprioritised(self, now: float) -> bool:
        """Others go first."""
        return now < self.deprioritised_until or now < self.next_try_at

    def admit(self, now: float) -> bool:
        """Whether it may be asked now. Where it is half-open the caller is its probe."""
        if now < self.next_try_at or self._probing:
            return False
        if self._open:
            self._probing = True
        return True

    def would_admit(self, now: float) -> bool:
        """The same question without taking the probe."""
        return now >= self.next_try_at and not self._probing

    def succeeded(self, now: float) -> None:
        """It has begun to answer."""
        self._in_a_row = 0
        if self._open and now >= self._no_probe_until:
            self._recovered_at = now
            self._outcomes.clear()
            self._open = self._probing = False
            self._unproven = True
            self.next_try_at = 0.0
        self.deprioritised_until = 0.0
        self._outcomes.append(True)

    def failed(self, now: float) -> None:
        """It did not answer as a server should."""
        self._in_a_row += 1
        self._outcomes.append(False)
        self.deprioritised_until = max(self.deprioritised_until, now + PAUSE_FIRST_SECONDS)
        if self._open and not self._probing:
            return  # a call that was under way when it opened
        if self._probing or self._in_a_row >= FAILURES_TO_OPEN or self._fails_often():
            self._open_for_a_pause(now)

    def completed(self) -> None:
        """An answer that it had begun has come whole."""
        self._broken_in_a_row = 0
        if not self._open:
            self._unproven, self._openings = False, 0

    def answer_broken(self, now: float) -> None:
        """An answer that it had begun did not come whole, by its own fault. Nor does a health check end the pause that
        this may bring: it had looked well all the time."""
        self._broken_in_a_row += 1
        if True in self._outcomes:
            self._outcomes.remove(True)
            self._outcomes.append(False)
        self.deprioritised_until = max(self.deprioritised_until, now + PAUSE_FIRST_SECONDS)
        if not self._open and (self._unproven or self._broken_in_a_row >= FAILURES_TO_OPEN or self._fails_often()):
            self._open_for_a_pause(now)
            self._keep_open_until(self.next_try_at)

    def _fails_often(self) -> bool:
        return len(self._outcomes) == WINDOW and self._outcomes.count(False) >= OPEN_SHARE * WINDOW

    def _open_for_a_pause(self, now: float) -> None:
        pause = min(PAUSE_FIRST_SECONDS * (1 << min(self._openings, 10)), PAUSE_MAX_SECONDS)
        self._open, self._probing = True, False
        self._openings += 1
        self._recovered_at = None
        self.next_try_at = max(self.next_try_at, now + pause)

    def abandoned(self) -> None:
        """The call was given up for reasons of its caller: nothing is known, and the next may probe."""
        self._probing = False

    def rest(self, now: float, seconds: float) -> None:
        """It asked for a pause (429 or 503 with `Retry-After`), which is no failure."""
        self._probing = False
        self._keep_open_until(now + min(seconds, REST_MAX_SECONDS))
        self.deprioritised_until = max(self.deprioritised_until, self.next_try_at)

    def deprioritise(self, now: float, seconds: float) -> None:
        """Something other than a call says that it may not work: others go first, and it is not closed for that."""
        self.deprioritised_until = max(self.deprioritised_until, now + seconds)

    def eject(self, now: float, seconds: float) -> None:
        """It answers, but so slowly that others should: open for a while, as if it had failed."""
        self._open = True
        self._recovered_at = None
        self._keep_open_until(now + seconds)

    def _keep_open_until(self, until: float) -> None:
        self._no_probe_until = max(self._no_probe_until, until)
        self.next_try_at = max(self.next_try_at, until)

    def allow_probe(self, now: float) -> None:
        """A health check found it well: half-open as soon as it may be asked at all."""
        if self._open and self.next_try_at > now:
            self.next_try_at = max(now, self._no_probe_until)

    def slot_share(self, now: float) -> float:
        """Of its places, how many it is given: all, or fewer while it is warming up after it was open."""
        if self._recovered_at is None:
            return 1.0
        age = now - self._recovered_at
        if age >= SLOW_START_SECONDS:
            self._recovered_at = None
            return 1.0
        return SLOW_START_SHARE + (1 - SLOW_START_SHARE) * age / SLOW_START_SECONDS
