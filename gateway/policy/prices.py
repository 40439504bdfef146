"""What tokens cost: by bucket, and by who asked for what and when."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from functools import cached_property
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BeforeValidator, Field, model_validator

from gateway.core.money import PRICE_DECIMALS, atoms_per_token
from gateway.core.times import datetime_to_ns
from gateway.policy.fields import Frozen, Names

Amount = Annotated[Decimal, Field(ge=0, max_digits=18, decimal_places=PRICE_DECIMALS)]


def parse_moment(value: Any) -> Any:
    """`2026-12-01`, `2026-12-01T06:00:00Z` -> a time; a day is its first moment, and UTC where nothing else is said."""
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, time())
    if not isinstance(value, datetime):
        try:
            value = datetime.fromisoformat(str(value))
        except ValueError:
            raise ValueError("a day or a time, as in 2026-12-01 or 2026-12-01T06:00:00Z") from None
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


_MomentText = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}")]
Moment = Annotated[datetime, BeforeValidator(parse_moment, json_schema_input_type=_MomentText)]


class TokenPrices(NamedTuple):
    """What one token of each bucket costs, in `money`'s atoms."""

    input: int
    cached_input: int
    cache_write: int
    cache_write_1h: int
    output: int
    reasoning: int
    audio_input: int
    audio_output: int


class Price(Frozen):
    """Money per million tokens, as decimals, and for which calls. A kind of input that is left out costs what input
    costs, and a kind of output what output costs.
    """

    input: Amount = Field(description="Per million input tokens that were computed.")
    cached_input: Amount | None = Field(None, description="Per million input tokens read from a prefix cache.")
    cache_write: Amount | None = Field(None, description="Per million input tokens computed and put into a cache.")
    cache_write_1h: Amount | None = Field(
        None, description="Of these, per million that the cache keeps for an hour; left out: as the others."
    )
    output: Amount = Field(Decimal(0), description="Per million output tokens.")
    reasoning: Amount | None = Field(None, description="Per million output tokens spent thinking.")
    audio_input: Amount | None = Field(None, description="Per million computed input tokens that were sound.")
    audio_output: Amount | None = Field(None, description="Per million output tokens that were sound.")
    currency: str = Field("USD", pattern="^[A-Z]{3}$", description="ISO 4217 code.")
    version: str = Field("1", description="Written into every receipt; change it with the price.")
    latency_class: Names | None = Field(None, alias="class", description="For calls of these latency classes alone.")
    service_tier: Names | None = Field(
        None, description="For these service tiers alone, as the reply names the tier, or else the request."
    )
    start: Moment | None = Field(None, alias="from", description="For calls that arrive at this time (UTC) or later.")
    until: Moment | None = Field(None, description="For calls that arrive before this time (UTC).")

    @model_validator(mode="after")
    def _begins_before_its_end(self) -> Self:
        if self.start is not None and self.until is not None and self.start >= self.until:
            raise ValueError("`from` must be earlier than `until`: this price never holds")
        return self

    @cached_property
    def atoms(self) -> TokenPrices:
        amounts = (
            self.input,
            _or(self.cached_input, self.input),
            _or(self.cache_write, self.input),
            _or(self.cache_write_1h, _or(self.cache_write, self.input)),
            self.output,
            _or(self.reasoning, self.output),
            _or(self.audio_input, self.input),
            _or(self.audio_output, self.output),
        )
        return TokenPrices._make(map(atoms_per_token, amounts))

    @cached_property
    def highest(self) -> tuple[int, int]:
        """What a token of the input may cost at most, and one of the output; in atoms."""
        each = self.atoms
        return (
            max(each.input, each.cached_input, each.cache_write, each.cache_write_1h, each.audio_input),
            max(each.output, each.reasoning, each.audio_output),
        )

    @cached_property
    def receipt_fields(self) -> dict[str, str | None]:
        """The prices as receipts have them, `price_*`, per million tokens and without exponents."""
        amounts = {f"price_{bucket}": getattr(self, bucket) for bucket in TokenPrices._fields}
        return {name: None if amount is None else f"{amount:f}" for name, amount in amounts.items()}

    @property
    def period_ns(self) -> tuple[int, int]:
        """From when on it holds, and until before when; since the epoch."""
        return datetime_to_ns(self.start) if self.start else 0, datetime_to_ns(self.until) if self.until else 1 << 63

    def holds_for(self, class_name: str, service_tier: str | None) -> bool:
        return (self.latency_class is None or class_name in self.latency_class) and (
            self.service_tier is None or service_tier in self.service_tier
        )


def _or(amount: Decimal | None, general: Decimal) -> Decimal:
    return general if amount is None else amount


def _one_is_a_list(value: Any) -> Any:
    return () if value is None else (value,) if isinstance(value, dict | Price) else value


Prices = Annotated[
    tuple[Price, ...], BeforeValidator(_one_is_a_list, json_schema_input_type=Price | tuple[Price, ...] | None)
]


class PriceList:
    """Prices of which the first that fits a call is its price. Those that fit a class and a tier are found once."""

    def __init__(self, prices: Iterable[Price]) -> None:
        self.prices: Collection[Price] = tuple(prices)
        self._tiers = frozenset(tier for price in self.prices for tier in price.service_tier or ())
        # By class, and tiers that are named here; each price behind its period.
        self._fitting: dict[tuple[str, str | None], list[tuple[int, int, Price]]] = {}

    def price(self, class_name: str, service_tier: str | None, time_ns: int) -> Price | None:
        """None where no price holds: such a call is unpriced."""
        terms = (class_name, service_tier if service_tier in self._tiers else None)
        fitting = self._fitting.get(terms)
        if fitting is None:
            fits = [price for price in self.prices if price.holds_for(*terms)]
            fitting = self._fitting[terms] = [(*price.period_ns, price) for price in fits]
        for from_ns, until_ns, price in fitting:
            if from_ns <= time_ns < until_ns:
                return price
        return None


__all__ = ["Moment", "Price", "PriceList", "Prices", "TokenPrices", "parse_moment"]
