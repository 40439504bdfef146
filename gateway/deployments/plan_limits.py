"""Limits of a deployment's own plan: a leaky bucket for requests and one for tokens, in this process.

A request counts when it is sent, and so does its prompt by the estimate. The output counts when it is billed. A full
bucket makes the deployment rest until there is room, as if it had answered with `Retry-After`.
"""

from __future__ import annotations

from gateway.policy.tenants import Rate


class PlanLimits:
    """The buckets of one deployment. Owned by the event loop."""

    def __init__(self) -> None:
        self._levels: dict[str, tuple[float, float]] = {}  # level and its time, in event-loop seconds

    def charge(self, what: str, rate: Rate | None, amount: float, now: float) -> float:
        """Add an amount to a bucket. Returns the seconds until one more fits; 0 without a limit."""
        if rate is None:
            return 0.0
        per_second = rate.amount / rate.period
        level, at = self._levels.get(what, (0.0, now))
        level = max(0.0, level - (now - at) * per_second) + amount
        self._levels[what] = level, now
        return max(0.0, (level + 1 - rate.amount) / per_second)
