"""What a tenant may use: a family of limits, each a charge against shared storage. `base` has the phase."""

from gateway.limits.base import Limit
from gateway.limits.budget import Budget
from gateway.limits.concurrency import Concurrency
from gateway.limits.requests import Requests
from gateway.limits.tokens import Tokens

LIMITS: tuple[Limit, ...] = (Requests(), Tokens(), Concurrency(), Budget())
"""In the order in which a call that breaks several is told of them."""

__all__ = ["LIMITS"]
