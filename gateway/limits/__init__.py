"""What may be used: a family of limits, each a charge against shared storage. `base` has the phase."""

from typing import Any

from gateway.limits.base import Limit
from gateway.limits.budget import Budget
from gateway.limits.concurrency import Concurrency
from gateway.limits.requests import Requests
from gateway.limits.tokens import InputTokens, OutputTokens, Tokens

LIMITS: tuple[type[Limit[Any]], ...] = (Requests, Tokens, InputTokens, OutputTokens, Concurrency, Budget)
"""In the order in which a call that breaks several in one scope is told of them."""

__all__ = ["LIMITS"]
