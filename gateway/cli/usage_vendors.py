"""`warmpath usage reconcile-vendor`: compares the ledger with the usage and cost reports of a vendor."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import httpx2
import typer

from gateway.billing.vendor_reports import (
    REQUEST_SECONDS,
    VENDORS,
    DayComparison,
    DayCounts,
    VendorReportError,
    VendorReports,
    compare_days,
    ledger_days,
    whole_days,
)
from gateway.cli.common import (
    MISUSE,
    PROBLEM,
    AsJson,
    fail,
    policy_or_exit,
    print_json,
    print_stderr,
    print_table,
    settings_or_exit,
    usage_error,
)
from gateway.cli.times import Since, Until
from gateway.cli.usage_common import LedgerOption, folder_of, readable
from gateway.cli.usage_reconcile import share
from gateway.core.money import plain_text
from gateway.policy import Policy
from gateway.policy.fields import parse_share

_COUNTS = ("input", "cached", "output")


def reconcile_vendor(
    vendor: Annotated[Literal["openai", "anthropic"], typer.Argument(help="The vendor: openai or anthropic.")],
    admin_key_file: Annotated[
        Path, typer.Option(metavar="FILE", help="File with an admin key of the vendor's organisation.")
    ],
    since: Since = None,
    until: Until = None,
    deployment: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEPLOYMENT",
            help="Deployment of the vendor. Repeatable. Default: those of the policy with the vendor's host.",
        ),
    ] = None,
    section: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SECTION",
            help="Only this project (OpenAI) or workspace (Anthropic) of the vendor, by its id. Repeatable.",
        ),
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Base URL of the vendor's API, including /v1. Default: its own.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Policy with the deployments. Default: WARMPATH_POLICY.")
    ] = None,
    tolerance: Annotated[
        str, typer.Option(callback=share, metavar="SHARE", help="Exit with code 1 if the drift is above this share.")
    ] = "1%",
    ledger: LedgerOption = None,
    as_json: AsJson = False,
) -> None:
    """Compare the ledger with a vendor's own reports. Compares usage and costs, by day.

    The vendor's reports have whole days (UTC). Without --since and --until they are the seven days before today. The
    ledger's cost is that of the price list, before the tenants' own terms, and includes work that no tenant pays for.
    DRIFT is the vendor's count minus the ledger's. A call across midnight can count on two different days, so judge by
    the total. Use a project or workspace of the vendor for the gateway alone: the vendor counts all of its clients.
    """
    with usage_error():
        first, last = whole_days(since, until, datetime.now(UTC).date())
    reports_of = VENDORS[vendor]
    names = deployment or _deployments_of(reports_of, policy_or_exit(settings_or_exit(policy=policy).policy))
    if not names:
        fail(f"no deployment of the policy has {vendor}'s host; name its deployments: --deployment NAME", code=MISUSE)
    folder = folder_of(ledger)
    try:
        headers = reports_of.headers(_read_key(admin_key_file))
        with httpx2.Client(headers=headers, timeout=REQUEST_SECONDS) as client:
            reported = reports_of(client, base_url, section or ()).read(first, last)
    except (OSError, ValueError, VendorReportError) as error:
        fail(str(error))
    with readable() as set_aside:
        compared = compare_days(reported, ledger_days(folder, names, first, last, set_aside=set_aside))
    if as_json:
        print_json({"deployments": [*names], "days": [_as_json(one) for one in compared]})
    else:
        _print_table(compared)
    total = compared[-1]
    if total.worst_share() > float(parse_share(tolerance)):
        print_stderr(f"{vendor}: drift {total.worst_share():.2%}, more than {tolerance}")
        raise typer.Exit(PROBLEM)


def _deployments_of(reports: type[VendorReports], policy: Policy) -> list[str]:
    host = urlsplit(reports.default_url).hostname
    return [each.name for each in policy.deployments if urlsplit(each.base_url).hostname == host]


def _read_key(file: Path) -> str:
    """Read an admin key. Raises `OSError` or `ValueError`, whose message does not contain it."""
    key = file.read_text(errors="replace").strip()
    if not key.isascii() or not key.isprintable() or not key or " " in key:
        raise ValueError(f"{file} has no key in its only line")
    return key


def _as_json(one: DayComparison) -> dict[str, Any]:
    return {
        "day": one.day,
        "vendor": _counts_as_json(one.vendor),
        "ledger": _counts_as_json(one.ledger),
        "drift": {
            **{of: one.drift(of) for of in _COUNTS},
            "cost": {currency: plain_text(amount) for currency, amount in one.cost_drift().items()},
        },
    }


def _counts_as_json(counts: DayCounts) -> dict[str, Any]:
    cost = {currency: plain_text(amount) for currency, amount in sorted(counts.cost.items())}
    return {**{of: getattr(counts, of) for of in _COUNTS}, "cost": cost}


def _print_table(compared: Sequence[DayComparison]) -> None:
    columns = ["DAY"]
    for what in ("INPUT", "CACHED", "OUTPUT", "COST"):
        columns += [what, "LEDGER", "DRIFT"]
    print_table(columns, [_row(one) for one in compared])


def _row(one: DayComparison) -> list[str]:
    cells = [one.day]
    for of in _COUNTS:
        cells += [str(getattr(one.vendor, of)), str(getattr(one.ledger, of)), str(one.drift(of))]
    return [*cells, *(_money(amounts) for amounts in (one.vendor.cost, one.ledger.cost, one.cost_drift()))]


def _money(amounts: dict[str, Any]) -> str:
    return ", ".join(f"{plain_text(amount)} {currency}" for currency, amount in sorted(amounts.items())) or "0"
