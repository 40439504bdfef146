"""Token prices of the policy: by kind of token, latency class, service tier and time.

`Price` is one price of the policy. `TokenPrices` is the same price in atoms (`gateway/core/money.py`), for exact
arithmetic. `PriceList` selects the price of a call. If no price of a list applies, the call is unpriced, never free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from functools import cached_property
from typing import Annotated, Any, NamedTuple, Self

import msgspec
from pydantic import BeforeValidator, Field, model_validator

from gateway.core.money import PRICE_DECIMALS, atoms_per_token
from gateway.core.times import datetime_to_ns
from gateway.policy.fields import CountOrZero, Frozen, Names

Amount = Annotated[Decimal, Field(ge=0, max_digits=18, decimal_places=PRICE_DECIMALS)]


def parse_moment(value: Any) -> Any:
    """Parse a day or a time: `2026-12-01`, `2026-12-01T06:00:00Z`. A day means its start; the default offset is UTC."""
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, time())
    if not isinstance(value, datetime):
        try:
            value = datetime.fromisoformat(str(value))
        except ValueError:
            raise ValueError("must be a day or a time, as in 2026-12-01 or 2026-12-01T06:00:00Z") from None
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


_MomentText = Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}")]
Moment = Annotated[datetime, BeforeValidator(parse_moment, json_schema_input_type=_MomentText)]


class TokenPrices(NamedTuple):
    """The cost of one token of each kind, in atoms."""

    input: int
    cached_input: int
    cache_write: int
    cache_write_1h: int
    output: int
    reasoning: int
    audio_input: int
    audio_output: int


class PriceForm(msgspec.Struct, frozen=True):
    """What bills and receipts need of a price, in the form in which they use it."""

    atoms: TokenPrices
    unit_atoms: dict[str, int]  # the cost of a thousandth of each unit that has a price
    storage_atoms: int  # the cost of keeping one token cached for an hour
    receipt_fields: dict[str, str | None]  # the `price_*` fields of a receipt
    version: str
    currency: str


UNITS = ("request", "image", "second", "search", "tool")
"""What is priced by the unit besides tokens, as vendors do. Quantities are in thousandths of a unit."""
MINUTES_CACHED = 5  # the lifetime of `cache_write`; that of `cache_write_1h` is an hour


class Price(Frozen):
    """Money per million tokens and per unit, and the calls to which it applies.

    If a kind of input tokens has no price, the price of input applies. The same holds for kinds of output tokens.
    """

    input: Amount = Field(description="Per million computed input tokens.")
    cached_input: Amount | None = Field(None, description="Per million input tokens read from a prefix cache.")
    cache_write: Amount | None = Field(None, description="Per million input tokens computed and written to a cache.")
    cache_write_1h: Amount | None = Field(
        None, description="Per million input tokens written to a cache for one hour. Default: cache_write."
    )
    output: Amount = Field(Decimal(0), description="Per million output tokens.")
    reasoning: Amount | None = Field(None, description="Per million reasoning tokens, which are part of the output.")
    audio_input: Amount | None = Field(None, description="Per million computed audio input tokens.")
    audio_output: Amount | None = Field(None, description="Per million audio output tokens.")
    request: Amount = Field(Decimal(0), description="Per request that a deployment worked for.")
    image: Amount = Field(Decimal(0), description="Per generated image that the reply counts.")
    second: Amount = Field(Decimal(0), description="Per second of audio or video that the reply counts.")
    search: Amount = Field(Decimal(0), description="Per web search that the reply counts.")
    tool: Amount = Field(Decimal(0), description="Per call of another tool that the server runs and the reply counts.")
    cache_storage: Amount = Field(
        Decimal(0),
        description="Per million tokens and hour that a cache keeps what was written: one hour for cache_write_1h, "
        "five minutes for other cache writes.",
    )
    currency: str = Field("USD", pattern="^[A-Z]{3}$", description="ISO 4217 code.")
    version: str = Field("1", description="Recorded in every receipt. Change it together with the price.")
    latency_class: Names | None = Field(
        None, alias="class", description="Apply to calls of these latency classes only."
    )
    service_tier: Names | None = Field(
        None, description="Apply to these service tiers only. The tier is the reply's, or else the request's."
    )
    above: CountOrZero | None = Field(
        None, description="Apply to calls whose prompt has more tokens than this, as in 200k. List the highest first."
    )
    region: Names | None = Field(None, description="Apply to deployments of these regions only.")
    start: Moment | None = Field(
        None, alias="from", description="Apply to calls that arrive at this time (UTC) or later."
    )
    until: Moment | None = Field(None, description="Apply to calls that arrive before this time (UTC).")

    @model_validator(mode="after")
    def _from_before_until(self) -> Self:
        if self.start is not None and self.until is not None and self.start >= self.until:
            raise ValueError("`from` must be earlier than `until`; otherwise this price never applies")
        return self

    @cached_property
    def atoms(self) -> TokenPrices:
        """The cost of one token of each kind, in atoms, with the defaults filled in."""
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
        """The highest cost of an input token and of an output token, in atoms. Used for reservations."""
        each = self.atoms
        return (
            max(each.input, each.cached_input, each.cache_write, each.cache_write_1h, each.audio_input),
            max(each.output, each.reasoning, each.audio_output),
        )

    @cached_property
    def unit_atoms(self) -> dict[str, int]:
        """The cost of a thousandth of each unit that has a price, in atoms."""
        priced = {unit: atoms_per_token(getattr(self, unit)) * 1_000 for unit in UNITS}
        return {unit: atoms for unit, atoms in priced.items() if atoms}

    @cached_property
    def storage_atoms(self) -> int:
        """The cost of keeping one token cached for an hour, in atoms."""
        return atoms_per_token(self.cache_storage)

    @cached_property
    def receipt_fields(self) -> dict[str, str | None]:
        """The `price_*` fields of a receipt: decimal text per million tokens, without exponents."""
        amounts = {f"price_{bucket}": getattr(self, bucket) for bucket in TokenPrices._fields}
        return {name: None if amount is None else f"{amount:f}" for name, amount in amounts.items()}

    @cached_property
    def form(self) -> PriceForm:
        """The price as bills and receipts need it. One read instead of many, since reads of policy models are slow."""
        return PriceForm(
            self.atoms, self.unit_atoms, self.storage_atoms, self.receipt_fields, self.version, self.currency
        )

    @property
    def period_ns(self) -> tuple[int, int]:
        """When the price applies: [from, until) in nanoseconds since the epoch."""
        return datetime_to_ns(self.start) if self.start else 0, datetime_to_ns(self.until) if self.until else 1 << 63

    def applies_to(self, class_name: str, service_tier: str | None) -> bool:
        """True if the price applies to this latency class and service tier. The period is checked separately."""
        return (self.latency_class is None or class_name in self.latency_class) and (
            self.service_tier is None or service_tier in self.service_tier
        )


def _or(amount: Decimal | None, default: Decimal) -> Decimal:
    return default if amount is None else amount


def _as_list(value: Any) -> Any:
    """Wrap a single price into a list: a policy may give one price instead of a list."""
    return () if value is None else (value,) if isinstance(value, dict | Price) else value


Prices = Annotated[
    tuple[Price, ...], BeforeValidator(_as_list, json_schema_input_type=Price | tuple[Price, ...] | None)
]


class PriceList:
    """A list of prices; the first one that applies to a call is used.

    The prices that apply to a latency class and service tier are cached, so that a call only compares times.
    """

    def __init__(self, prices: Iterable[Price]) -> None:
        self.prices: Collection[Price] = tuple(prices)
        self._tiers = frozenset(tier for price in self.prices for tier in price.service_tier or ())
        # By class and tier. Tiers that no price names share the key None, so that clients cannot grow the cache.
        self._applicable: dict[tuple[str, str | None], list[tuple[int, int, int, Price]]] = {}

    def price(self, class_name: str, service_tier: str | None, time_ns: int, *, input_tokens: int = 0) -> Price | None:
        """The price of a call that arrived at `time_ns`, with a prompt of `input_tokens`.

        None if no price applies: the call is unpriced.
        """
        terms = (class_name, service_tier if service_tier in self._tiers else None)
        applicable = self._applicable.get(terms)
        if applicable is None:
            matching = [price for price in self.prices if price.applies_to(*terms)]
            applicable = self._applicable[terms] = [
                (*price.period_ns, -1 if price.above is None else price.above, price) for price in matching
            ]
        # The first one in the policy wins, also if periods overlap.
        for from_ns, until_ns, above, price in applicable:
            if from_ns <= time_ns < until_ns and input_tokens > above:
                return price
        return None

    @property
    def tiers(self) -> frozenset[str]:
        """The service tiers that prices of the list name."""
        return self._tiers

    def possible(self, class_name: str, service_tier: str | None, time_ns: int) -> list[Price]:
        """All prices that a call may get, by the length of its prompt."""
        lengths = {0, *(price.above + 1 for price in self.prices if price.above is not None)}
        found = [self.price(class_name, service_tier, time_ns, input_tokens=tokens) for tokens in lengths]
        return list(dict.fromkeys(price for price in found if price is not None))


__all__ = ["UNITS", "Moment", "Price", "PriceList", "Prices", "TokenPrices", "parse_moment"]
