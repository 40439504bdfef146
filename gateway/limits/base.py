"""What a limit is: one kind of charge, in one scope. The phase that reserves them is `limiter`."""

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


class Estimate(msgspec.Struct, frozen=True):
    """The most that a call may use. `output_is_guessed` where the call itself sets no bound."""

    input_tokens: int
    output_tokens: int
    output_is_guessed: bool
    cost_nanos: int
    now: float


ChargeType = TypeVar("ChargeType", RateCharge, SlotCharge, SpendCharge)


class Limit(ABC, Generic[ChargeType]):
    """Made once for all calls of its scope; has no state of its own."""

    kind: ClassVar[str]
    """Its name in the policy."""
    header_kind: ClassVar[Literal["requests", "tokens"] | None] = None
    """In which of OpenAI's headers a client is told of it."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    @classmethod
    @abstractmethod
    def of(cls, limits: Limits, scope: Scope) -> Self | None:
        """None where there is no such limit."""

    @abstractmethod
    def charge(self, estimate: Estimate) -> ChargeType:
        """What a call reserves. Its key is made by `Scope.key`."""

    @abstractmethod
    def actual(self, usage: Usage, cost_nanos: int) -> int:
        """What it used in the end, in the unit of the charge."""

    @abstractmethod
    def refuse(self, charge: ChargeType, refused: Rejection) -> GatewayError:
        """The refusal names the limit and its scope."""


Rates = Sequence[tuple[int, int]]
"""Of each price that a call may come to: the most that a token of its input may cost, and one of its output. In atoms.
"""


def rates_of(prices: Iterable[Price]) -> Rates:
    return tuple({price.highest: None for price in prices})


def estimate_of(call: Call, now: float, *, rates: Rates | None = None) -> Estimate:
    """The whole prompt uncached and the longest answer, at the dearest of `rates`; left out: of the servers' that the
    call may reach.
    """
    output_tokens = call.max_output_tokens
    if call.operation is Operation.EMBEDDING:
        output_tokens = 0
    guessed = output_tokens is None
    if output_tokens is None:
        output_tokens = call.principal.tenant.limits.default_output_tokens
    if rates is None:
        rates = rates_of(call.policy.prices_by_model[call.model.name])
    input_tokens = call.prompt_tokens_estimate
    return Estimate(input_tokens, output_tokens, guessed, dearest_cost_nanos(rates, input_tokens, output_tokens), now)


def dearest_cost_nanos(rates: Rates, input_tokens: int, output_tokens: int) -> int:
    dearest = 0
    for per_input, per_output in rates:
        cost = input_tokens * per_input + output_tokens * per_output
        if cost > dearest:
            dearest = cost
    return atoms_to_nanos(dearest)
