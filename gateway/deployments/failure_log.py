"""What the log says of a server that fails: why it does, that it is left out, and that it is asked again.

One line now and then, however many calls fail: metrics count them, and their receipts name each attempt.
"""

from __future__ import annotations

import logging

LOG_INTERVAL_SECONDS = 10.0  # between two lines that say why one server fails

log = logging.getLogger("warmpath")


class FailureLog:
    """One server's. Times are event-loop seconds."""

    __slots__ = ("_name", "_next_line_at", "_opened_at", "_suppressed")

    def __init__(self, name: str) -> None:
        self._name = name
        self._next_line_at = 0.0
        self._suppressed = 0  # failures since the last line
        self._opened_at: float | None = None

    def failed(self, outcome: str, why: str, call_id: str, now: float) -> None:
        """`outcome` is how receipts and metrics call it; in `why` there are no words of a client or of a model."""
        if now < self._next_line_at:
            self._suppressed += 1
            return
        more = f"; {self._suppressed} failures before this one are in no line" if self._suppressed else ""
        log.warning(
            "%s failed (%s): %s%s", self._name, outcome, why, more,
            extra={"deployment": self._name, "outcome": outcome, "call_id": call_id},
        )  # fmt: skip
        self._next_line_at, self._suppressed = now + LOG_INTERVAL_SECONDS, 0

    def breaker_changed(self, is_left_out: bool, now: float) -> None:
        """Whether it is, by its breaker; to be called whenever that may have changed."""
        if is_left_out is (self._opened_at is not None):
            return
        fields = {"deployment": self._name}
        if self._opened_at is None:
            self._opened_at = now
            log.warning("%s is left out, until a call that tries it is answered", self._name, extra=fields)
        else:
            seconds, self._opened_at = now - self._opened_at, None
            log.info("%s is asked again: it has begun to answer, after %.1f s", self._name, seconds, extra=fields)
