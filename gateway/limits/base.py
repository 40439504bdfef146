"""Interface of a limit (requests, tokens, money, concurrency). An implementation says what a call is charged.

`gateway.limits.limiter` reserves the charges of all limits that apply to a call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, Generic, Literal, Self, TypeVar

import msgspec

from gateway.core.errors import GatewayError
from gateway.core.money import atoms_to_nanos
from gateway.limits.scope import Scope
from gateway.policy import Limits, Price
from gateway.storage.base import RateCharge, Rejection, SlotCharge, SpendCharge
from gateway.types import Call, Usage


class CallEstimate(msgspec.Struct, frozen=True):
    """The most that a call may use. If the call itself does not bound its output, `output_is_guessed` is true."""

    input_tokens: int
    output_tokens: int
    output_is_guessed: bool
    cost_nanos: int  # billionths of a currency unit
    now: float  # seconds since the epoch


ChargeType = TypeVar("ChargeType", RateCharge, SlotCharge, SpendCharge)


class Limit(ABC, Generic[ChargeType]):
    """A limit in one scope, for example requests per minute of one key. All calls of the scope share the object."""

    kind: ClassVar[str]
    """The limit's name in the policy."""
    header_kind: ClassVar[Literal["requests", "tokens"] | None] = None
    """The kind of OpenAI's `x-ratelimit-*` headers that report the limit. None if no header does."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    @classmethod
    @abstractmethod
    def from_policy(cls, limits: Limits, scope: Scope) -> Self | None:
        """Create the limit that the policy sets in this scope. None if the policy does not set this kind of limit."""

    @abstractmethod
    def charge(self, estimate: CallEstimate) -> ChargeType:
        """Return the charge that a call reserves. Its key comes from `Scope.key`."""

    @abstractmethod
    def actual(self, usage: Usage, cost_nanos: int) -> int:
        """Return what a finished call used, in the unit of the charge."""

    @abstractmethod
    def rejection(self, charge: ChargeType, rejected: Rejection) -> GatewayError:
        """Return the error for a call that exceeds the limit. Its message names the limit and its scope."""


HighestPrices = Sequence[tuple[int, int]]
"""One pair per price that may apply to a call: the highest cost of an input and of an output token, in atoms."""


def highest_prices(prices: Iterable[Price]) -> HighestPrices:
    """Return `Price.highest` of each price, without duplicates."""
    return tuple({price.highest: None for price in prices})


def estimate_call(
    call: Call, now: float, *, prices: HighestPrices | None = None, may_extend: bool = False
) -> CallEstimate:
    """Estimate the most that a call may use: all of its prompt without cache hits, and the longest possible answer.

    If the call does not bound its output, tokens are a guess by the policy, and money is reserved for all that the
    model can generate. If `may_extend`, money is reserved for the guess, since more is reserved while the
    call streams. The cost is computed at the highest of `prices`, by default at the dearest price that this very call
    can meet (`gateway.policy.price_bounds`).
    """
    output_tokens = call.max_output_tokens
    if not call.has_prefix:
        output_tokens = 0
    guessed = output_tokens is None
    priced_output = output_tokens
    if output_tokens is None or priced_output is None:
        output_tokens = call.principal.tenant.limits.default_output_tokens
        priced_output = output_tokens if may_extend else max(output_tokens, call.policy.max_output_tokens(call.model))
    input_tokens = call.input_tokens_estimate
    if prices is not None:
        cost_nanos = highest_cost_nanos(prices, input_tokens, priced_output)
    else:
        kind = (call.principal.tenant.priced_as, call.model_name, call.class_name, call.service_tier)
        dearest = call.policy.price_bounds.dearest(kind, int(now * 1e9), input_tokens, priced_output)
        cost_nanos = atoms_to_nanos(dearest)
    return CallEstimate(input_tokens, output_tokens, guessed, cost_nanos, now)


def highest_cost_nanos(prices: HighestPrices, input_tokens: int, output_tokens: int) -> int:
    """Return the cost of these tokens at the price that makes them most expensive, in nanos, rounded up."""
    highest = 0
    for per_input, per_output in prices:
        cost = input_tokens * per_input + output_tokens * per_output
        if cost > highest:
            highest = cost
    return atoms_to_nanos(highest)
