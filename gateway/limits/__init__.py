"""Phase 4: the family of limits, and the limiter that reserves them all for a call, or none.

It may import `storage`, `policy` and what is below them. Begin at `base.py`, what a limit is. Then read `limiter.py`,
the phase itself, and `outage_fallback.py`, which decides while the storage is unreachable.
"""

from typing import Any

from gateway.limits.base import Limit
from gateway.limits.budget import BudgetLimit
from gateway.limits.concurrency import ConcurrencyLimit
from gateway.limits.requests import RequestLimit
from gateway.limits.tokens import InputTokenLimit, OutputTokenLimit, TokenLimit

LIMITS: tuple[type[Limit[Any]], ...] = (
    RequestLimit,
    TokenLimit,
    InputTokenLimit,
    OutputTokenLimit,
    ConcurrencyLimit,
    BudgetLimit,
)
"""The family. If a call exceeds several limits of one scope, the error names the first of them in this order."""

__all__ = ["LIMITS"]
