"""Exports the ledger as FOCUS, the FinOps Open Cost and Usage Specification (focus.finops.org).

The export has all columns that version 1.2 requires of a provider like this one, and all columns of version 1.0. A row
states how many tokens of one kind, or how many requests, images or other units, one key used on one day (UTC) at one
price. Its cost is exactly the quantity times the unit price, which includes the tenant's factor and exchange rate. A
correction of a call whose month was closed before (`gateway.billing.books`) is a row of ChargeClass `Correction`, in
the billing period in which it was made. A correction within an open month has no class, as the specification says, and
stands on the day of the call. Credits and adjustments are rows of their categories. Unpriced calls have no cost and
therefore no rows.

Usage that is priced in another currency than it is billed in has both prices: `PricingCurrency...` are those of the
price list. All other rows are priced in the billing currency.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, timedelta
from decimal import Context, Decimal, Inexact
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gateway.billing.invoice_lines import invoice_id
from gateway.billing.ledger.reader import EVERYTHING, TOKENS, Period, SetAside
from gateway.billing.ledger.rows import Adjustment
from gateway.billing.ledger.tables import connect
from gateway.core.money import plain_text

COLUMNS = (
    "AvailabilityZone", "BilledCost", "BillingAccountId", "BillingAccountName", "BillingAccountType", "BillingCurrency",
    "BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency",
    "ChargePeriodEnd", "ChargePeriodStart", "CommitmentDiscountCategory", "CommitmentDiscountId",
    "CommitmentDiscountName", "CommitmentDiscountStatus", "CommitmentDiscountType", "ConsumedQuantity", "ConsumedUnit",
    "ContractedCost", "ContractedUnitPrice", "EffectiveCost", "InvoiceId", "InvoiceIssuerName", "ListCost",
    "ListUnitPrice", "PricingCategory", "PricingCurrency", "PricingCurrencyContractedUnitPrice",
    "PricingCurrencyEffectiveCost", "PricingCurrencyListUnitPrice", "PricingQuantity", "PricingUnit", "ProviderName",
    "PublisherName", "RegionId", "RegionName", "ResourceId", "ResourceName", "ResourceType", "ServiceCategory",
    "ServiceName", "ServiceSubcategory", "SkuId", "SkuMeter", "SkuPriceDetails", "SkuPriceId", "SubAccountId",
    "SubAccountName", "SubAccountType", "Tags",
)  # fmt: skip

TAG_PREFIX = "warmpath/"  # the specification wants one of its own for the tags of each provider
_UNIT = "Tokens"
_UNIT_NAMES = {
    "request": "Requests",
    "image": "Images",
    "second": "Seconds",
    "search": "Searches",
    "tool": "Tool calls",
}
_PRICES = (
    "input", "cached_input", "cache_write", "cache_write_1h", "output", "reasoning", "audio_input", "audio_output",
)  # fmt: skip
_INHERITED = {
    "cached_input": "input", "cache_write": "input", "cache_write_1h": "cache_write", "reasoning": "output",
    "audio_input": "input", "audio_output": "output",
}  # fmt: skip
_GROUP = (
    "finished[:10]", "kind", "source = 'cache'", "tenant", "key_id", "model_asked", "deployment", "latency_class",
    "service_tier", "currency", "price_version", "price_factor", "exchange_rate", "price_currency", "region",
    "if(kind = 'correction', corrected, NULL)", *(f"price_{name}" for name in _PRICES),
)  # fmt: skip
_NAMES = ("day", "kind", "from_cache", *_GROUP[3:15], "corrected", *_GROUP[16:], *TOKENS, "cost")
_COSTS = ("BilledCost", "ContractedCost", "EffectiveCost", "ListCost", "PricingCurrencyEffectiveCost")
_EXACT = Context(prec=60, traps=[Inexact])


def focus_rows(
    ledger: Path,
    *,
    provider: str,
    period: Period = EVERYTHING,
    set_aside: SetAside = None,
    closed: Mapping[str, str] = MappingProxyType({}),
    adjustments: Iterable[Adjustment] = (),
) -> Iterator[dict[str, str]]:
    """Yield the rows of a period. Values are strings, as in CSV. `provider` is the name of the service's provider.

    `closed` says when each closed month was closed. Raises `UnreadableLedger`.
    """
    sums = ", ".join(f"sum({name})" for name in TOKENS)
    query = (
        f"SELECT {', '.join(_GROUP)}, {sums}, sum(cost) FROM bills "
        f"WHERE currency IS NOT NULL AND {period.condition} GROUP BY ALL ORDER BY ALL"
    )
    # Quantities that are not tokens, by the unit and its price.
    units_query = (
        f"SELECT {', '.join(_GROUP)}, unit, json_extract_string(price_units, '$.\"' || unit || '\"') AS price, "
        "sum(json_extract_string(units, '$.\"' || unit || '\"')::DECIMAL(24, 3)) "
        "FROM (SELECT *, unnest(json_keys(units)) AS unit FROM bills WHERE units IS NOT NULL"
        f" AND price_units IS NOT NULL) WHERE currency IS NOT NULL AND {period.condition} GROUP BY ALL ORDER BY ALL"
    )
    with connect(ledger, set_aside=set_aside) as connection:
        groups = connection.execute(query, period.parameters).fetchall()
        counted = connection.execute(units_query, period.parameters).fetchall()
        if not all(_is_day(values[0]) for values in groups) and connection.set_aside_unreadable():
            groups = connection.execute(query, period.parameters).fetchall()
    units: dict[tuple[Any, ...], list[tuple[str, str, Decimal]]] = {}
    for *key, unit, price, quantity in counted:
        if price is not None:
            units.setdefault(tuple(key), []).append((unit, price, quantity))
    for values in groups:
        group = dict(zip(_NAMES, values, strict=True))
        common = _common(group, provider)
        if group["kind"] == "correction":
            yield _correction(common, group, closed)
            continue
        billed = Decimal(0)
        for bucket, tokens in _buckets(group).items():
            if tokens:
                row = _usage(common, group, bucket, tokens)
                billed += Decimal(row["BilledCost"])
                yield row
        for unit, price, quantity in units.get(values[: len(_GROUP)], ()):
            row = _units(common, group, unit, Decimal(price), quantity)
            billed += Decimal(row["BilledCost"])
            yield row
        if billed != group["cost"]:  # another version of the gateway priced these calls by other rules
            rest = group["cost"] - billed
            # The category is not Usage, whose rows must have a quantity and a price.
            yield _charge(
                common, "Usage that cannot be itemised", rest, ChargeCategory="Adjustment", ChargeFrequency="One-Time"
            )
    for each in adjustments:
        yield _adjustment(each, provider)


def _correction(common: dict[str, str], group: dict[str, Any], closed: Mapping[str, str]) -> dict[str, str]:
    """A correction of a closed month belongs to the period in which it was made, any other to the call's own."""
    written, period = group["corrected"], group["day"][:7]
    if written is None or period not in closed or closed[period] > written:
        return _charge(
            common, "Correction of earlier charges", group["cost"], ChargeCategory="Adjustment",
            ChargeFrequency="One-Time",
        )  # fmt: skip
    return _charge(
        {**common, **_billing_period(date.fromisoformat(written[:10]))},
        "Correction of earlier charges",
        group["cost"],
        ChargeClass="Correction",
    )


def _adjustment(row: Adjustment, provider: str) -> dict[str, str]:
    day = date.fromisoformat(f"{row.period}-01")
    group = {"day": day.isoformat(), "tenant": row.tenant, "currency": row.currency, "key_id": "", "deployment": None,
             "latency_class": None, "service_tier": None, "region": None}  # fmt: skip
    common = {
        **_common(group, provider),
        "SubAccountType": "",
        "ChargePeriodEnd": _billing_period(day)["BillingPeriodEnd"],
    }
    category = "Credit" if row.type == "credit" else "Adjustment"
    return _charge(common, row.reason, Decimal(row.amount), ChargeCategory=category, ChargeFrequency="One-Time")


def _is_day(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False


def _buckets(group: dict[str, Any]) -> dict[str, Decimal]:
    tokens = {name: Decimal(group[name] or 0) for name in TOKENS}
    return {
        "input": tokens["input_uncached"] - tokens["audio_input"],
        "cached_input": tokens["cache_read"],
        "cache_write": tokens["cache_write"] - tokens["cache_write_1h"],
        "cache_write_1h": tokens["cache_write_1h"],
        "output": tokens["output"] - tokens["reasoning"] - tokens["audio_output"],
        "reasoning": tokens["reasoning"],
        "audio_input": tokens["audio_input"],
        "audio_output": tokens["audio_output"],
    }


def _unit_price(group: dict[str, Any], bucket: str) -> Decimal:
    """Return the price of one token of a kind. A kind without a price inherits one, as in `gateway.policy.prices`."""
    while (per_million := group[f"price_{bucket}"]) is None and bucket in _INHERITED:
        bucket = _INHERITED[bucket]
    return Decimal(per_million or 0).scaleb(-6)


def _usage(common: dict[str, str], group: dict[str, Any], bucket: str, tokens: Decimal) -> dict[str, str]:
    """Return the row of the tokens of one kind."""
    what = bucket.replace("_", " ") + (" answered from the response cache" if group["from_cache"] else "")
    kind = f"cached-answer/{bucket}" if group["from_cache"] else bucket
    return _priced(common, group, kind, _unit_price(group, bucket), tokens, _UNIT, f"{what} tokens")


def _units(
    common: dict[str, str], group: dict[str, Any], unit: str, price: Decimal, quantity: Decimal
) -> dict[str, str]:
    """Return the row of what is priced by the unit, as requests and images."""
    name = _UNIT_NAMES.get(unit, unit.capitalize())
    return _priced(common, group, unit, price, quantity, name, name)


def _priced(
    common: dict[str, str], group: dict[str, Any], kind: str, price: Decimal, quantity: Decimal, unit: str, meter: str
) -> dict[str, str]:
    """Return a row of usage. `price` is that of the price list, and `kind` the part of the SKU after the model."""
    factor, rate = Decimal(group["price_factor"] or 1), Decimal(group["exchange_rate"] or 1)
    list_price, own_price = _EXACT.multiply(price, rate), _EXACT.multiply(price, factor)
    unit_price = _EXACT.multiply(own_price, rate)
    sku = f"{group['model_asked']}/{kind}"
    row = _charge(
        common,
        f"{group['model_asked']}: {meter[0].lower()}{meter[1:]}",
        _EXACT.multiply(unit_price, quantity),
        ConsumedQuantity=plain_text(quantity),
        ConsumedUnit=unit,
        ContractedUnitPrice=plain_text(unit_price),
        ListUnitPrice=plain_text(list_price),
        PricingCategory="Standard",
        PricingCurrency=group["price_currency"] or group["currency"],
        PricingCurrencyContractedUnitPrice=plain_text(own_price),
        PricingCurrencyEffectiveCost=plain_text(_EXACT.multiply(own_price, quantity)),
        PricingCurrencyListUnitPrice=plain_text(price),
        PricingQuantity=plain_text(quantity),
        PricingUnit=unit,
        SkuId=sku,
        SkuMeter=f"{meter[0].upper()}{meter[1:]}",
        SkuPriceDetails=json.dumps({"x_Model": group["model_asked"], "x_Meter": kind}),
        SkuPriceId=f"{sku}/{group['price_version']}",
    )
    return {**row, "ListCost": plain_text(_EXACT.multiply(list_price, quantity))}


def _charge(common: dict[str, str], description: str, cost: Decimal, **more: str) -> dict[str, str]:
    money = dict.fromkeys(_COSTS, plain_text(cost))
    invoice = invoice_id(common["BillingAccountId"], common["BillingPeriodStart"][:7], common["BillingCurrency"])
    return {
        **dict.fromkeys(COLUMNS, ""), **common, **money, "InvoiceId": invoice, "ChargeDescription": description, **more,
    }  # fmt: skip


def _common(group: dict[str, Any], provider: str) -> dict[str, str]:
    day = date.fromisoformat(group["day"])
    tags = {f"{TAG_PREFIX}{name}": group[name] for name in ("latency_class", "service_tier") if group[name]}
    return {
        "BillingAccountId": group["tenant"],
        "BillingAccountName": group["tenant"],
        "BillingAccountType": "Tenant",
        "BillingCurrency": group["currency"],
        **_billing_period(day),
        "RegionId": group["region"] or "",
        "RegionName": group["region"] or "",
        "ChargeCategory": "Usage",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _midnight(day),
        "ChargePeriodEnd": _midnight(day + timedelta(days=1)),
        "InvoiceIssuerName": provider,
        "PricingCurrency": group["currency"],
        "ProviderName": provider,
        "PublisherName": provider,
        "ResourceId": group["deployment"] or "",
        "ResourceName": group["deployment"] or "",
        "ResourceType": "Deployment" if group["deployment"] else "",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Model inference",
        "ServiceSubcategory": "Generative AI",
        "SubAccountId": group["key_id"],
        "SubAccountName": group["key_id"],
        "SubAccountType": "API key",
        "Tags": json.dumps(tags),
    }


def _billing_period(day: date) -> dict[str, str]:
    month = day.replace(day=1)
    end = (month + timedelta(days=31)).replace(day=1)
    return {"BillingPeriodStart": _midnight(month), "BillingPeriodEnd": _midnight(end)}


def _midnight(day: date) -> str:
    return f"{day.isoformat()}T00:00:00Z"
