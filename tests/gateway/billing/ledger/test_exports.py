"""Exports of the ledger: FOCUS, and Stripe's meter events."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import orjson
import pytest

from gateway.billing.ledger.focus import COLUMNS, focus_rows
from gateway.billing.ledger.reader import Period
from gateway.billing.ledger.stripe import NoStripeCustomer, meter_events
from tests.gateway.billing.ledger.receipts import a_correction, a_receipt, write_chain

# What version 1.2 of the specification has as mandatory in its cost and usage dataset.
MANDATORY = {
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd", "BillingPeriodStart",
    "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargePeriodEnd", "ChargePeriodStart", "ContractedCost",
    "EffectiveCost", "InvoiceIssuerName", "ListCost", "PricingQuantity", "PricingUnit", "ProviderName",
    "PublisherName", "ServiceCategory", "ServiceName",
}  # fmt: skip
MAY_BE_EMPTY = {"ChargeClass", "PricingQuantity", "PricingUnit"}


def test_every_charge_is_quantity_times_unit_price(tmp_path: Path) -> None:
    receipt = a_receipt(
        reasoning=1, audio_input=6, audio_output=1, price_audio_output="2", cache_write=4, cache_write_1h=3,
        price_cache_write="0.2", cost="0.000007440", service_tier="flex",
    )  # fmt: skip
    write_chain(tmp_path / "replica", [receipt, receipt, a_receipt(cost=None, currency=None)])
    rows = list(focus_rows(tmp_path, provider="Us"))
    assert all(set(row) == set(COLUMNS) for row in rows)
    assert set(COLUMNS) >= MANDATORY
    assert all(row[name] for row in rows for name in MANDATORY - MAY_BE_EMPTY)
    assert {row["SkuMeter"]: (row["PricingQuantity"], row["BilledCost"]) for row in rows} == {
        "Input tokens": ("60", "0.000006"),
        "Cached input tokens": ("128", "0.00000128"),
        "Cache write tokens": ("2", "0.0000004"),
        "Cache write 1h tokens": ("6", "0.0000012"),
        "Output tokens": ("2", "0.0000008"),
        "Reasoning tokens": ("2", "0.0000008"),
        "Audio input tokens": ("12", "0.0000012"),
        "Audio output tokens": ("2", "0.000004"),
        "": ("", "-0.0000008"),  # the cost of these receipts differs from these prices
    }
    for row in rows:
        if row["SkuMeter"]:
            assert Decimal(row["ListUnitPrice"]) * Decimal(row["PricingQuantity"]) == Decimal(row["BilledCost"])
    assert sum(Decimal(row["BilledCost"]) for row in rows) == 2 * Decimal("0.00000744")
    (day,) = {(row["ChargePeriodStart"], row["ChargePeriodEnd"]) for row in rows}
    assert day == ("2026-11-20T00:00:00Z", "2026-11-21T00:00:00Z")
    (month,) = {(row["BillingPeriodStart"], row["BillingPeriodEnd"]) for row in rows}
    assert month == ("2026-11-01T00:00:00Z", "2026-12-01T00:00:00Z")
    assert orjson.loads(rows[0]["Tags"]) == {"warmpath/latency_class": "realtime", "warmpath/service_tier": "flex"}


def test_what_is_priced_by_the_unit_is_usage_of_its_own(tmp_path: Path) -> None:
    priced = {"price_input": "0", "price_cached_input": "0", "price_output": "0"}
    image = a_receipt(**priced, units={"image": "2.5", "request": "1"}, price_units={"image": "0.04", "request": "0.1"},
                      cost="0.2", list_cost="0.2")  # fmt: skip
    search = a_receipt(**priced, units={"search": "3"}, price_units={"search": "0.01"}, cost="0.03")
    dearer = a_receipt(**priced, units={"search": "3"}, price_units={"search": "0.02"}, cost="0.06")
    write_chain(tmp_path / "replica", [image, image, search, dearer])
    rows = [row for row in focus_rows(tmp_path, provider="Us") if row["BilledCost"] != "0"]
    assert sorted(
        (row["PricingUnit"], row["PricingQuantity"], row["ListUnitPrice"], row["BilledCost"]) for row in rows
    ) == [
        ("Images", "5", "0.04", "0.2"),
        ("Requests", "2", "0.1", "0.2"),
        ("Searches", "3", "0.01", "0.03"),
        ("Searches", "3", "0.02", "0.06"),
    ]
    assert {row["ChargeCategory"] for row in rows} == {"Usage"}


def test_a_correction_is_a_row_of_its_own(tmp_path: Path) -> None:
    receipt = a_receipt()
    write_chain(tmp_path / "replica", [receipt, a_correction(receipt, cost="-0.000001")])
    rows = list(focus_rows(tmp_path, provider="Us"))
    assert {row["ChargeClass"] for row in rows} == {""}, "its month is open"
    assert [row["BilledCost"] for row in rows if row["ChargeCategory"] == "Adjustment"] == ["-0.000001"]
    assert sum(Decimal(row["BilledCost"]) for row in rows) == Decimal("0.00000444")


def test_each_receipt_is_a_meter_event_with_its_id(tmp_path: Path) -> None:
    receipt = a_receipt(input_uncached=1, cache_read=2, cache_write=3, output=4)
    nothing = a_receipt(input_uncached=0, cache_read=0, output=0)
    write_chain(tmp_path / "replica", [receipt, nothing, a_receipt(source="cache"), a_correction(receipt, output=-1)])
    (event,) = meter_events(tmp_path, event_name="tokens", customers={"acme": "cus_1"})
    assert event == {
        "event_name": "tokens",
        "identifier": receipt.event_id,
        "timestamp": "2026-11-20T10:00:01.000001Z",
        "payload": {"stripe_customer_id": "cus_1", "value": "10"},
    }
    (event,) = meter_events(tmp_path, event_name="tokens", customers={"acme": "cus_1"}, value="cache_read")
    assert event["payload"]["value"] == "2"


def test_a_tenant_without_a_customer_is_named(tmp_path: Path) -> None:
    write_chain(tmp_path / "replica", [a_receipt(tenant="cus_2"), a_receipt(tenant="nobody")])
    (event,) = meter_events(tmp_path, event_name="t", customers={}, period=Period(only={"tenant": ["cus_2"]}))
    assert event["payload"]["stripe_customer_id"] == "cus_2"
    with pytest.raises(NoStripeCustomer, match="'nobody'"):
        list(meter_events(tmp_path, event_name="t", customers={}))
