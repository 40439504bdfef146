"""Computes the cost of a call, and makes its receipt.

Usage is priced by the price list of the deployment that did the work, as of the call's arrival. An answer from the
response cache costs the model's `cache_price`, or nothing if the model has none. If no deployment answered, the cost is
zero. Work without a known price has the cost `None`, not zero. docs/explanation/billing.md says which price applies.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.core.ids import new_event_id
from gateway.core.money import atoms_to_text
from gateway.core.times import rfc3339
from gateway.policy import Deployment, Price
from gateway.policy.prices import TokenPrices
from gateway.types import Attempt, AttemptRow, Call, Outcome, PhaseTimings, Receipt, UnbilledTokens, Usage

_NO_PRICES = dict.fromkeys([f"price_{bucket}" for bucket in TokenPrices._fields])


class Bill(msgspec.Struct, frozen=True):
    """The cost of a call, in atoms (`gateway.core.money`). `cost` is None if work was done without a known price."""

    cost: int | None
    price: Price | None = None
    service_tier: str | None = None  # the tier that selected the price


def cost_of(usage: Usage, price: Price) -> int:
    """Return the exact cost in atoms. Each token costs the price of its kind (input, cached input, output, ...)."""
    uncached, cached, cache_write, cache_write_1h, output, reasoning, audio_input, audio_output = price.atoms
    return (
        (usage.input_uncached - usage.audio_input) * uncached
        + usage.cache_read * cached
        + (usage.cache_write - usage.cache_write_1h) * cache_write
        + usage.cache_write_1h * cache_write_1h
        + (usage.output - usage.reasoning - usage.audio_output) * output
        + usage.reasoning * reasoning
        + usage.audio_input * audio_input
        + usage.audio_output * audio_output
    )


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
    model = call.model.name
    if from_cache:
        prices = call.policy.cache_prices.get(model)
        if prices is None:
            return Bill(0, service_tier=service_tier)
    elif deployment is None:
        return Bill(None if usage.total else 0, service_tier=service_tier)
    else:
        prices = call.policy.price_lists.get((model, deployment.name))
    price = prices.price(call.class_name, service_tier, arrived_ns) if prices is not None else None
    return Bill(None if price is None else cost_of(usage, price), price, service_tier)


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
) -> Receipt:
    """Make the receipt of a call that has ended.

    `deployment` is the same as for `bill_of`. If the call has an `opened` row in the ledger, the caller passes that
    row's `started` and `trace_id`, so that the receipt agrees with the row. `implausible` is the meter's.
    """
    price = bill.price
    prices = price.receipt_fields if price else _NO_PRICES
    # Positional: forty keyword arguments would cost more than everything else in this function.
    return Receipt(
        new_event_id(),
        call.id,
        call.principal.tenant.name,
        call.principal.key_id,
        call.end_user,
        call.operation,
        call.asked_model,
        deployment.model if deployment else None,
        deployment.name if deployment else None,
        call.class_name,
        bill.service_tier,
        started or rfc3339(timings.started_ns),
        rfc3339(timings.ended_ns or timings.now_ns()),
        (timings.first_chunk_ns - timings.started_ns) / 1e9 if timings.first_chunk_ns else None,
        outcome,
        "cache" if from_cache else "engine" if usage.exact else "estimate",
        usage.exact,
        usage.input_uncached,
        usage.cache_read,
        usage.cache_write,
        usage.output,
        usage.reasoning,
        price.version if price else None,
        prices["price_input"],
        prices["price_cached_input"],
        prices["price_output"],
        None if bill.cost is None else atoms_to_text(bill.cost),
        price.currency if price else None,
        tuple(map(_attempt_row, attempts)),
        call.policy.hash,
        trace_id or f"{call.trace.trace_id:032x}",
        prices["price_cache_write"],
        prices["price_reasoning"],
        prices["price_audio_input"],
        prices["price_audio_output"],
        usage.audio_input,
        usage.audio_output,
        prices["price_cache_write_1h"],
        usage.cache_write_1h,
        implausible,
    )


def _attempt_row(attempt: Attempt) -> AttemptRow:
    unbilled = attempt.unbilled
    return AttemptRow(
        attempt.deployment,
        attempt.outcome,
        attempt.status,
        rfc3339(attempt.started_ns),
        rfc3339(attempt.ended_ns),
        "%016x" % attempt.span_id,  # noqa: UP031 (half of what a format specification takes)
        attempt.predicted_cached_tokens,
        attempt.continues,
        None if unbilled is None else UnbilledTokens(unbilled.input, unbilled.output, unbilled.exact),
    )
