"""Computes the cost of a call, and makes its receipt.

Usage is priced by the price list of the deployment that did the work, as of the call's arrival. An answer from the
response cache costs the model's `cache_price`, or nothing if the model has none. If no deployment answered, the cost is
zero. Work without a known price has the cost `None`, not zero. docs/explanation/billing.md says which price applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from itertools import repeat

import msgspec

from gateway.core.ids import new_event_id
from gateway.core.money import atoms_to_text, plain_text
from gateway.core.times import rfc3339
from gateway.policy import REALTIME, Deployment, Policy, Price
from gateway.policy.prices import MINUTES_CACHED, UNITS, PriceForm, PriceList, TokenPrices
from gateway.policy.tenant_prices import Terms
from gateway.types import Attempt, AttemptRow, Call, Outcome, PhaseTimings, Receipt, UnbilledTokens, Usage

_NO_PRICES = dict.fromkeys([f"price_{bucket}" for bucket in TokenPrices._fields])


class Bill(msgspec.Struct, frozen=True):
    """The cost of a call, in atoms (`gateway.core.money`). `cost` is None if work was done without a known price.

    `list_cost` is the cost before the tenant's `terms`, in the price's own currency.
    """

    cost: int | None
    price: Price | None = None
    service_tier: str | None = None  # the tier that the reply named, or else the request
    terms: Terms | None = None
    list_cost: int = 0


def cost_of(usage: Usage, price: Price) -> int:
    """Return the exact cost in atoms: each token at the price of its kind, each unit, and the storage of a cache.

    Only the storage of tokens that are cached for minutes is rounded, up to an atom.
    """
    form = price.form
    uncached, cached, cache_write, cache_write_1h, output, reasoning, audio_input, audio_output = form.atoms
    return (
        (usage.input_uncached - usage.audio_input) * uncached
        + usage.cache_read * cached
        + (usage.cache_write - usage.cache_write_1h) * cache_write
        + usage.cache_write_1h * cache_write_1h
        + (usage.output - usage.reasoning - usage.audio_output) * output
        + usage.reasoning * reasoning
        + usage.audio_input * audio_input
        + usage.audio_output * audio_output
        + (_unit_cost(usage, form) if form.unit_atoms or form.storage_atoms else 0)
    )


def quantities(usage: Usage) -> dict[str, int]:
    """Return the billed quantity of each unit, in thousandths. A request counts if its work is billed."""
    return {**dict(usage.units), **({"request": 1_000} if usage.total or usage.units else {})}


def _unit_cost(usage: Usage, price: PriceForm) -> int:
    counted = quantities(usage)
    units = sum(counted.get(unit, 0) * atoms for unit, atoms in price.unit_atoms.items())
    minutes = (usage.cache_write - usage.cache_write_1h) * price.storage_atoms * MINUTES_CACHED
    return units + usage.cache_write_1h * price.storage_atoms - (-minutes // 60)


def select_price(
    policy: Policy,
    prices: PriceList,
    usage: Usage,
    *,
    tenant: str,
    class_name: str,
    service_tier: str | None,
    time_ns: int,
) -> Price | None:
    """Return the price of a call. None if no price applies.

    A service tier that the policy does not grant never lowers the price: then the dearer of the tier's price and the
    price without a tier applies.
    """
    price = prices.price(class_name, service_tier, time_ns, input_tokens=usage.input)
    if (
        price is None
        or price.service_tier is None
        or policy.grants_tier(service_tier, tenant=tenant, class_name=class_name)
    ):
        return price
    plain = prices.price(class_name, None, time_ns, input_tokens=usage.input)
    return price if plain is None or cost_of(usage, plain) <= cost_of(usage, price) else plain


def price_usage(
    policy: Policy,
    prices: PriceList,
    usage: Usage,
    *,
    tenant: str,
    model: str,
    class_name: str,
    service_tier: str | None,
    time_ns: int,
) -> Bill:
    """Price usage by a list and the tenant's terms. The same values always give the same bill."""
    price = select_price(
        policy, prices, usage, tenant=tenant, class_name=class_name, service_tier=service_tier, time_ns=time_ns
    )
    if price is None:
        return Bill(None, service_tier=service_tier)
    if usage.units and not usage.total and price.unit_atoms.keys().isdisjoint(quantities(usage)):
        return Bill(None, service_tier=service_tier)  # the price has tokens only, and there are none
    terms = policy.terms(tenant, price, model=model, class_name=class_name, time_ns=time_ns)
    if terms is None:
        return Bill(None, service_tier=service_tier)
    list_cost = cost_of(usage, price)
    return Bill(terms.apply(list_cost), price, service_tier, terms, list_cost)


def bill_of(
    call: Call,
    usage: Usage,
    deployment: Deployment | None,
    *,
    arrived_ns: int,
    service_tier: str | None = None,
    from_cache: bool = False,
) -> Bill:
    """Price a call's usage by the prices that applied when the call arrived. `deployment` did the billed work."""
    model = call.model_name
    if from_cache:
        prices = call.policy.cache_prices.get(model)
        if prices is None:
            return Bill(0, service_tier=service_tier)
    elif deployment is None:
        return Bill(None if usage.total else 0, service_tier=service_tier)
    else:
        prices = call.policy.prices_of(model, deployment.name, deployment.region)
    if prices is None:
        return Bill(None, service_tier=service_tier)
    return price_usage(
        call.policy, prices, usage, tenant=call.principal.tenant.priced_as, model=model, class_name=call.class_name,
        service_tier=service_tier, time_ns=arrived_ns,
    )  # fmt: skip


def make_receipt(
    call: Call,
    usage: Usage,
    *,
    outcome: Outcome,
    timings: PhaseTimings,
    bill: Bill,
    attempts: Sequence[Attempt] = (),
    deployment: Deployment | None = None,
    from_cache: bool = False,
    started: str | None = None,
    trace_id: str | None = None,
    implausible: str | None = None,
    leased: bool = False,
) -> Receipt:
    """Make the receipt of a call that has ended.

    `deployment` is the same as for `bill_of`. If the call has an `opened` row in the ledger, the caller passes that
    row's `started` and `trace_id`, so that the receipt agrees with the row. `timings.started_ns` must be the same time
    as `started`, since the times of attempts are relative to it. `implausible` is the meter's.
    `leased` is the reservation's.
    """
    price = bill.price.form if bill.price is not None else None
    prices = price.receipt_fields if price else _NO_PRICES
    terms = bill.terms
    adjusted = terms is not None and not terms.is_list_price
    served = deployment.name if deployment else None
    # Positional: forty keyword arguments would cost more than everything else in this function.
    return Receipt(
        new_event_id(),
        call.id,
        call.principal.tenant_name,
        call.principal.key_id,
        call.asked_model,
        deployment.model_for(call.wildcard) if deployment else None,
        served,
        started or rfc3339(timings.started_ns),
        rfc3339(timings.ended_ns or timings.now_ns()),
        (timings.first_chunk_ns - timings.started_ns) / 1e9 if timings.first_chunk_ns else None,
        "cache" if from_cache else "engine" if usage.exact else "estimate",
        usage.input_uncached,
        usage.cache_read,
        usage.output,
        price.version if price else None,
        prices["price_input"],
        prices["price_cached_input"],
        prices["price_output"],
        None if bill.cost is None else atoms_to_text(bill.cost),
        terms.currency if terms else None,
        tuple(map(_attempt_row, attempts, repeat(served), repeat(timings.started_ns // 1000))),
        call.policy.hash,
        trace_id or f"{call.trace.trace_id:032x}",
        call.endpoint_name,
        REALTIME if call.class_name == REALTIME else call.class_name,
        outcome._value_,
        call.end_user,
        bill.service_tier,
        usage.exact,
        usage.cache_write,
        usage.reasoning,
        prices["price_cache_write"],
        prices["price_reasoning"],
        prices["price_audio_input"],
        prices["price_audio_output"],
        usage.audio_input,
        usage.audio_output,
        prices["price_cache_write_1h"],
        usage.cache_write_1h,
        implausible,
        usage.remainder,
        _unit_quantities(usage, bill.price, price),
        _unit_prices(bill.price, price) if bill.price and price else {},
        atoms_to_text(bill.list_cost) if adjusted else None,
        plain_text(terms.factor) if adjusted and terms else None,
        plain_text(terms.rate) if adjusted and terms else None,
        price.currency if price and terms and terms.currency != price.currency else None,
        deployment.region if deployment else None,
        leased,
        call.route,
        call.routed_model,
        call.principal.tenant.parents,
    )


def _unit_quantities(usage: Usage, price: Price | None, form: PriceForm | None) -> dict[str, str]:
    """The quantities that are not tokens: all that were reported, and the request if it has a price."""
    if not usage.units and (form is None or not form.unit_atoms):
        return {}
    shown = quantities(usage)
    if price is None or not price.request:
        shown.pop("request", None)
    return {unit: plain_text(Decimal(amount).scaleb(-3)) for unit, amount in shown.items()}


def _unit_prices(price: Price, form: PriceForm) -> dict[str, str]:
    if not form.unit_atoms and not form.storage_atoms:
        return {}
    amounts = {unit: getattr(price, unit) for unit in (*UNITS, "cache_storage")}
    return {unit: plain_text(amount) for unit, amount in amounts.items() if amount}


def _attempt_row(attempt: Attempt, served: str | None, receipt_started: int) -> AttemptRow:
    """Make the row of an attempt. `receipt_started` is the start of the receipt, in microseconds since the epoch."""
    unbilled = attempt.unbilled
    started = attempt.started_ns // 1000
    return AttemptRow(
        "%016x" % attempt.span_id,  # noqa: UP031 (half of what a format specification takes)
        (started - receipt_started) / 1e6,
        (attempt.ended_ns // 1000 - started) / 1e6,
        attempt.predicted_cached_tokens,
        None if attempt.deployment == served else attempt.deployment,
        attempt.outcome,
        attempt.status,
        attempt.continues,
        None if unbilled is None else _unbilled_tokens(unbilled),
    )


def _unbilled_tokens(usage: Usage) -> UnbilledTokens:
    return UnbilledTokens(usage.input, usage.output, usage.exact, usage.cache_read)
