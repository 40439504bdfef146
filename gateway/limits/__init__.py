"""Phase 4: the kinds of limits, and the limiter, which reserves all limits of a call or none.

This package may import `storage`, `policy` and what is below them. Read `base.py` first, which defines the interface of
a limit. `limiter.py` is the phase itself, and `applicable.py` finds the limits of a call. `slices.py` admits calls
without a storage operation. `outage_fallback.py` enforces limits while the storage is unreachable.
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
"""All kinds of limits. If a call exceeds several limits of one scope, the error names the first one in this order."""

__all__ = ["LIMITS"]
