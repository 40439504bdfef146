"""What a tenant pays in proportion to the price lists: markups, committed use, discounts, and its currency.

A list price is multiplied by the factor of the tenant's first adjustment that applies, and by the exchange rate that
was valid when the call arrived. Both are in the receipt, so that a bill can be computed again from the policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import ROUND_HALF_EVEN, Context, Decimal
from typing import Annotated, Self

import msgspec
from msgspec.structs import force_setattr
from pydantic import Field, model_validator

from gateway.core.times import datetime_to_ns
from gateway.policy.fields import Frozen, Name, Names
from gateway.policy.prices import Moment

Factor = Annotated[Decimal, Field(ge=0, le=1000, max_digits=12, decimal_places=9)]
Rate = Annotated[Decimal, Field(gt=0, max_digits=18, decimal_places=9)]
Currency = Annotated[str, Field(pattern="^[A-Z]{3}$")]
ONE = Decimal(1)
_PRECISE = Context(prec=100)


class PriceAdjustment(Frozen):
    """A factor on list prices, for some of a tenant's calls."""

    factor: Factor = Field(description="1.2 is a markup of 20 %, 0.7 the price under committed use.")
    reason: Name = Field(description="Recorded in the policy's history, as in 'committed use 2026'.")
    model: Names | None = Field(None, description="For these models only, by name.")
    latency_class: Names | None = Field(None, alias="class", description="For calls of these latency classes only.")
    start: Moment | None = Field(None, alias="from", description="For calls that arrive at this time (UTC) or later.")
    until: Moment | None = Field(None, description="For calls that arrive before this time (UTC).")

    @model_validator(mode="after")
    def _from_before_until(self) -> Self:
        _check_period(self.start, self.until)
        return self

    def applies_to(self, model: str, class_name: str, time_ns: int) -> bool:
        """Whether the adjustment applies to a call that arrived at `time_ns`."""
        return (
            (self.model is None or model in self.model)
            and (self.latency_class is None or class_name in self.latency_class)
            and _contains(self.start, self.until, time_ns)
        )


class ExchangeRate(Frozen):
    """How much of one currency one unit of another is worth, for a time."""

    base: Currency = Field(description="Currency of the price.")
    quote: Currency = Field(description="Currency in which the tenant is billed.")
    rate: Rate = Field(description="Units of `quote` for one unit of `base`.")
    start: Moment | None = Field(None, alias="from", description="For calls that arrive at this time (UTC) or later.")
    until: Moment | None = Field(None, description="For calls that arrive before this time (UTC).")

    @model_validator(mode="after")
    def _from_before_until(self) -> Self:
        _check_period(self.start, self.until)
        return self

    def applies_to(self, base: str, quote: str, time_ns: int) -> bool:
        """Whether this is the rate between two currencies at a time."""
        return (self.base, self.quote) == (base, quote) and _contains(self.start, self.until, time_ns)


class Terms(msgspec.Struct, frozen=True):
    """The terms of one call: by what its list price is multiplied, and the currency of the result."""

    factor: Decimal
    rate: Decimal
    currency: str
    is_list_price: bool = True  # nothing is changed; follows from the two factors

    def __post_init__(self) -> None:
        force_setattr(self, "is_list_price", self.factor == 1 and self.rate == 1)

    def apply(self, atoms: int) -> int:
        """Return the cost of a list price, in atoms of `currency`, rounded half to even."""
        if self.is_list_price:
            return atoms
        cost = _PRECISE.multiply(_PRECISE.multiply(Decimal(atoms), self.factor), self.rate)
        return int(cost.quantize(Decimal(1), rounding=ROUND_HALF_EVEN, context=_PRECISE))


def find_terms(
    adjustments: Iterable[PriceAdjustment],
    rates: Iterable[ExchangeRate],
    *,
    currency: str | None,
    price_currency: str,
    model: str,
    class_name: str,
    time_ns: int,
) -> Terms | None:
    """Return the terms of a call. None if the policy has no exchange rate for its time: then it is unpriced."""
    factor = next((each.factor for each in adjustments if each.applies_to(model, class_name, time_ns)), ONE)
    if currency is None or currency == price_currency:
        return Terms(factor, ONE, price_currency)
    rate = next((each.rate for each in rates if each.applies_to(price_currency, currency, time_ns)), None)
    return None if rate is None else Terms(factor, rate, currency)


def _contains(start: Moment | None, until: Moment | None, time_ns: int) -> bool:
    return (start is None or datetime_to_ns(start) <= time_ns) and (until is None or time_ns < datetime_to_ns(until))


def _check_period(start: Moment | None, until: Moment | None) -> None:
    if start is not None and until is not None and start >= until:
        raise ValueError("`from` must be earlier than `until`; otherwise this never applies")
