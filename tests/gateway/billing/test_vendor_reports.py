"""The ledger equals the usage and cost reports of its vendors, or the difference is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner, Result

from gateway.billing import vendor_reports
from gateway.billing.ledger.rows import Row, UnbilledWork
from gateway.billing.vendor_reports import (
    VENDORS,
    DayCounts,
    VendorReportError,
    VendorReports,
    compare_days,
    ledger_days,
    whole_days,
)
from gateway.cli import app
from gateway.core.ids import new_event_id
from tests.gateway.billing.ledger.receipts import a_receipt, write_chain
from tests.gateway.billing.vendor import ADMIN_KEY, Day, ScriptedVendor, served

SINCE, UNTIL = date(2026, 11, 18), date(2026, 11, 23)
VENDOR = ScriptedVendor(
    {
        "2026-11-19": {"gateway": Day(30, 64, 6, 3, "0.00000544")},
        "2026-11-22": {"gateway": Day(30, 64, 6, 10, "0.1"), "other": Day(1, 0, 0, 1, "7")},
    }
)
COUNTED = {
    "2026-11-19": DayCounts(100, 64, 3, {"USD": Decimal("0.00000544")}),
    "2026-11-22": DayCounts(100, 64, 10, {"USD": Decimal("0.1")}),
}


def reports(vendor: str, *sections: str, transport: httpx2.MockTransport | None = None) -> VendorReports:
    headers = VENDORS[vendor].headers(ADMIN_KEY)
    return VENDORS[vendor](
        httpx2.Client(headers=headers, transport=transport or VENDOR.transport()), sections=list(sections)
    )


@pytest.mark.parametrize("vendor", VENDORS)
def test_all_pages_of_a_report_are_read(vendor: str) -> None:
    VENDOR.requests.clear()
    found = reports(vendor, "gateway").read(SINCE, UNTIL)
    assert {day: counts for day, counts in found.items() if counts.input} == COUNTED
    assert len(VENDOR.requests) == (9 if vendor == "openai" else 6), "three pages of each report"
    everything = reports(vendor).read(SINCE, UNTIL)["2026-11-22"]
    assert (everything.input, everything.output, everything.cost) == (101, 11, {"USD": Decimal("7.1")})


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """What the gateway knows of the vendor's days: receipts with terms, unbilled work, and calls of no interest."""
    known = {"deployment": "hosted", "reasoning": 0, "cache_write": 6, "input_uncached": 30}
    rows: list[Row] = [
        a_receipt(**known, finished="2026-11-19T23:59:59.999999Z"),
        a_receipt(
            **known, finished="2026-11-22T10:00:00.000000Z", list_cost="0.09", cost="0.18", currency="EUR",
            price_currency="USD", price_factor="2", exchange_rate="1",
        ),
        UnbilledWork(
            event_id=new_event_id(), call_id="req_2", attempt=1, tenant="acme", key_id="key_1", model_asked="gpt-4o",
            deployment="hosted", started="2026-11-22T09:59:59.000000Z", finished="2026-11-22T10:00:00.000000Z",
            exact=False, input_uncached=0, cache_read=0, cache_write=0, output=7, reasoning=0, trace_id="0" * 32,
            outcome="hedge_lost", cost="0.01", currency="USD",
        ),
        a_receipt(**known, finished="2026-11-22T10:00:00.000000Z", source="cache"),
        a_receipt(finished="2026-11-22T10:00:00.000000Z"),
        a_receipt(**known, finished="2026-11-23T00:00:00.000000Z"),
    ]  # fmt: skip
    write_chain(tmp_path / "ledger" / "replica", rows, rows_per_segment=10)
    return tmp_path / "ledger"


def test_the_ledger_has_what_the_vendor_should_have_billed(ledger: Path) -> None:
    assert ledger_days(ledger, ["hosted"], SINCE, UNTIL) == COUNTED
    *days, total = compare_days(reports("anthropic", "gateway").read(SINCE, UNTIL), COUNTED)
    assert {day.worst_share() for day in days} == {0.0}
    assert (total.day, total.vendor, total.worst_share()) == ("total", total.ledger, 0.0)


def test_drift_is_the_vendors_count_less_the_ledgers() -> None:
    vendor = {"2026-11-19": DayCounts(110, 0, 4, {"USD": Decimal(3)}), "2026-11-20": DayCounts()}
    first, second, total = compare_days(vendor, {"2026-11-19": DayCounts(100, 0, 4, {"EUR": Decimal(2)})})
    assert (first.drift("input"), first.drift("cached"), first.drift("output")) == (10, 0, 0)
    assert first.cost_drift() == {"EUR": Decimal(-2), "USD": Decimal(3)}
    assert (first.worst_share(), second.worst_share(), total.worst_share()) == (1.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"data": [{"results": []}]}, "KeyError"),
        ({"data": 5}, "TypeError"),
        ({}, "KeyError"),
        ({"data": [{"start_time": 1e99, "starting_at": "now", "results": []}]}, "unknown form"),
        ({"data": [], "has_more": True, "next_page": "again"}, "pages"),
        ([], "unknown form"),
        (
            {"data": [{"start_time": 0, "starting_at": "2026-11-20T00:00:00Z",
                       "results": [{"input_tokens": -1, "uncached_input_tokens": "many"}]}]},
            "is no number of tokens",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_report_of_another_form_is_named(vendor: str, body: Any, why: str) -> None:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, json=body))
    with pytest.raises(VendorReportError, match=why):
        reports(vendor, transport=transport).read(SINCE, UNTIL)


def test_a_page_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor_reports, "PAGE_BYTES_MAX", 8)
    with pytest.raises(VendorReportError, match="a page has more than"):
        reports("openai").read(SINCE, UNTIL)


@pytest.mark.parametrize(
    ("since", "until", "days"),
    [
        (None, None, (date(2026, 11, 20), date(2026, 11, 27))),
        ("2026-11-01T00:00:00.000000Z", None, (date(2026, 11, 1), date(2026, 11, 27))),
        (None, "2026-11-10T00:00:00.000000Z", (date(2026, 11, 3), date(2026, 11, 10))),
        ("2026-11-10T00:00:00.000001Z", None, None),
        ("2026-11-10T00:00:00.000000Z", "2026-11-10T00:00:00.000000Z", None),
    ],
)
def test_vendors_report_whole_days(since: str | None, until: str | None, days: tuple[date, date] | None) -> None:
    if days is None:
        with pytest.raises(ValueError, match="day"):
            whole_days(since, until, date(2026, 11, 27))
    else:
        assert whole_days(since, until, date(2026, 11, 27)) == days


@pytest.fixture
def reconcile(ledger: Path, tmp_path: Path) -> Callable[..., Result]:
    def run(base_url: str, *options: str, key: str = ADMIN_KEY) -> Result:
        file = tmp_path / "admin.key"
        file.write_text(key + "\n")
        period = ("--since", "2026-11-18", "--until", "2026-11-23", "--ledger", str(ledger))
        command = ["usage", "reconcile-vendor", "openai", "--admin-key-file", str(file), "--base-url", base_url]
        return CliRunner().invoke(app, [*command, *period, *options])

    return run


def test_the_command_compares_by_day_and_fails_at_drift(reconcile: Callable[..., Result]) -> None:
    own = ("--deployment", "hosted")
    with served(VENDOR) as url:
        equal = reconcile(url, *own, "--section", "gateway", "--json")
        drifted = reconcile(url, *own)
        refused = reconcile(url, *own, key="sk-wrong")
        hostile = reconcile(url, *own, key="sk-\x00\nadmin")
    assert equal.exit_code == 0, equal.output
    *_, total = json.loads(equal.stdout)["days"]
    assert total["drift"] == {"input": 0, "cached": 0, "output": 0, "cost": {"USD": "0"}}
    assert drifted.exit_code == 1 and "drift 98.59%" in drifted.stderr
    assert "7.10000544 USD" in drifted.stdout
    assert refused.exit_code == 1 and "status 401; is it an admin key?" in refused.stderr
    assert hostile.exit_code == 1 and "has no key" in hostile.stderr and "sk-" not in hostile.output


def test_deployments_are_those_with_the_vendors_host(reconcile: Callable[..., Result], tmp_path: Path) -> None:
    def policy_of(**hosts: str) -> str:
        deployments = [{"name": name, "base_url": url, "model": "m"} for name, url in hosts.items()]
        models = [{"name": "m", "deployments": [*hosts]}]
        file = tmp_path / "policy.yaml"
        file.write_text(json.dumps({"deployments": deployments, "models": models, "tenants": [{"name": "acme"}]}))
        return str(file)

    own = {"own": "http://10.0.0.1/v1"}
    with served(VENDOR) as url:
        policy = policy_of(hosted="https://api.openai.com/v1", **own)
        found = reconcile(url, "--policy", policy, "--section", "gateway", "--json")
        missing = reconcile(url, "--policy", policy_of(**own))
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["deployments"] == ["hosted"]
    assert missing.exit_code == 2 and "--deployment NAME" in missing.stderr
