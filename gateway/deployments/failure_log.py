"""Logs the failures of one deployment, when its circuit breaker opens and closes, and when it is ejected.

The log is rate-limited, however many requests fail: metrics count all failures, and receipts list each attempt.
"""

from __future__ import annotations

import logging

LOG_INTERVAL_SECONDS = 10.0  # between two logged failures of one deployment
USAGE_LOG_INTERVAL_SECONDS = 3600.0  # between two logged cases of implausible usage of one deployment

log = logging.getLogger("warmpath")


class FailureLog:
    """The log of one deployment. Times are event-loop seconds."""

    __slots__ = (
        "_name", "_next_line_at", "_next_usage_line_at", "_opened_at", "_suppressed", "implausible_usages",
        "last_reason",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self._name = name
        self._next_line_at = 0.0
        self._suppressed = 0  # failures since the last logged one
        self._opened_at: float | None = None
        self._next_usage_line_at = 0.0
        self.implausible_usages = 0  # replies whose token counts were impossible
        self.last_reason = ""  # of the newest failure, for `/ready`; empty after a success closed the breaker

    def failed(self, outcome: str, reason: str, call_id: str, now: float) -> None:
        """Log a failure. `outcome` is its name in receipts and metrics.

        `reason` must not contain text of a client or of a model.
        """
        self.last_reason = reason
        if now < self._next_line_at:
            self._suppressed += 1
            return
        suppressed = f"; {self._suppressed} similar failures suppressed" if self._suppressed else ""
        log.warning(
            "%s failed (%s): %s%s", self._name, outcome, reason, suppressed,
            extra={"deployment": self._name, "outcome": outcome, "call_id": call_id},
        )  # fmt: skip
        self._next_line_at, self._suppressed = now + LOG_INTERVAL_SECONDS, 0

    def usage_implausible(self, why: str, call_id: str, now: float) -> None:
        """Count a reply whose token counts are not billed, and log the first one of an hour."""
        self.implausible_usages += 1
        if now < self._next_usage_line_at:
            return
        self._next_usage_line_at = now + USAGE_LOG_INTERVAL_SECONDS
        log.warning(
            "%s reported implausible usage; such calls are billed by an estimate (%d since the start): %s",
            self._name, self.implausible_usages, why, extra={"deployment": self._name, "call_id": call_id},
        )  # fmt: skip

    def ejected(self, reason: str, seconds: float, call_id: str) -> None:
        """Log an ejection for a wrong configuration. The pause between two of them bounds the number of lines."""
        log.error(
            "%s: ejected for %g s: %s", self._name, seconds, reason,
            extra={"deployment": self._name, "outcome": "ejected", "call_id": call_id},
        )  # fmt: skip

    def breaker_changed(self, is_open: bool, now: float) -> None:
        """Log that the breaker opened or closed. Call it whenever `is_open` may have changed."""
        if is_open is (self._opened_at is not None):
            return
        fields = {"deployment": self._name}
        if self._opened_at is None:
            self._opened_at = now
            log.warning("%s: circuit breaker open; a probe request will close it", self._name, extra=fields)
        else:
            seconds, self._opened_at = now - self._opened_at, None
            self.last_reason = ""
            log.info("%s: circuit breaker closed after %.1f s", self._name, seconds, extra=fields)
