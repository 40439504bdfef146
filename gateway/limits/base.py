"""A limit: one kind of charge in one scope. `gateway.limits.limiter` reserves the charges."""

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
from gateway.types import Call, Operation, Usage


class CallEstimate(msgspec.Struct, frozen=True):
    """The most that a call may use. `output_is_guessed` if the call itself sets no bound on its output."""

    input_tokens: int
    output_tokens: int
    output_is_guessed: bool
    cost_nanos: int  # billionths of a currency unit
    now: float  # seconds since the epoch


ChargeType = TypeVar("ChargeType", RateCharge, SlotCharge, SpendCharge)


class Limit(ABC, Generic[ChargeType]):
    """One limit of one scope. Created once for all calls of its scope; has no state that differs between calls."""

    kind: ClassVar[str]
    """The limit's name in the policy."""
    header_kind: ClassVar[Literal["requests", "tokens"] | None] = None
    """Which of OpenAI's `x-ratelimit-*` headers report it, if any."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    @classmethod
    @abstractmethod
    def from_policy(cls, limits: Limits, scope: Scope) -> Self | None:
        """The limit that the policy sets in this scope. None if it sets none."""

    @abstractmethod
    def charge(self, estimate: CallEstimate) -> ChargeType:
        """What a call reserves. `Scope.key` makes its key."""

    @abstractmethod
    def actual(self, usage: Usage, cost_nanos: int) -> int:
        """What the call used in the end, in the unit of the charge."""

    @abstractmethod
    def rejection(self, charge: ChargeType, rejected: Rejection) -> GatewayError:
        """The error for a call that does not fit. Its message names the limit and its scope."""


HighestPrices = Sequence[tuple[int, int]]
"""For each price that may apply to a call: the most that an input token and an output token may cost, in atoms."""


def highest_prices(prices: Iterable[Price]) -> HighestPrices:
    """`Price.highest` of each price, without duplicates."""
    return tuple({price.highest: None for price in prices})


def estimate_call(call: Call, now: float, *, prices: HighestPrices | None = None) -> CallEstimate:
    """The whole prompt without cache hits and the longest answer, at the highest of `prices`.

    Without `prices`, at those of all deployments that the call may reach.
    """
    output_tokens = call.max_output_tokens
    if call.operation is Operation.EMBEDDING:
        output_tokens = 0
    guessed = output_tokens is None
    if output_tokens is None:
        output_tokens = call.principal.tenant.limits.default_output_tokens
    if prices is None:
        prices = highest_prices(call.policy.prices_by_model[call.model.name])
    input_tokens = call.prompt_tokens_estimate
    cost_nanos = highest_cost_nanos(prices, input_tokens, output_tokens)
    return CallEstimate(input_tokens, output_tokens, guessed, cost_nanos, now)


def highest_cost_nanos(prices: HighestPrices, input_tokens: int, output_tokens: int) -> int:
    """The cost of these tokens at the price that makes them dearest, in nanos, rounded up."""
    highest = 0
    for per_input, per_output in prices:
        cost = input_tokens * per_input + output_tokens * per_output
        if cost > highest:
            highest = cost
    return atoms_to_nanos(highest)
