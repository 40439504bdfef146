"""`warmpath usage forecast`: what the month in progress will cost."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated

import typer

from gateway.billing.forecast import forecast_month
from gateway.cli.common import AsJson, print_json, print_table
from gateway.cli.usage_common import LedgerOption, Models, Tenants, folder_of, period_of, readable
from gateway.core.money import plain_text

GROUPS = ("tenant", "organisation", "key", "user", "model", "class", "deployment")


def _groups(names: list[str] | None) -> list[str]:
    for name in names or []:
        if name not in GROUPS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(GROUPS)}")
    return list(dict.fromkeys(names or ["tenant"]))


def forecast(
    by: Annotated[
        list[str] | None,
        typer.Option(callback=_groups, metavar="WHAT", help=f"Group by {', '.join(GROUPS)}. Repeatable."),
    ] = None,
    tenant: Tenants = None,
    model: Models = None,
    ledger: LedgerOption = None,
    as_json: AsJson = False,
) -> None:
    """Forecast the cost of the month in progress (UTC). Groups by tenant unless --by says otherwise.

    LINEAR extrapolates the cost so far. WEEKDAY adds to it, for each day left, the mean cost of the same weekday in the
    last four weeks; it needs a week of receipts.
    """
    only, now = period_of(None, None, tenant, model).only, datetime.now(UTC)
    with readable() as set_aside:
        found = forecast_month(folder_of(ledger), now=now, by=by or (), only=only, set_aside=set_aside)
    if as_json:
        names = ("spent", "linear", "by_weekday")
        print_json(
            [
                {**each.group, "currency": each.currency, **{name: _text(getattr(each, name)) for name in names}}
                for each in found
            ]
        )
        return
    columns = [*map(str.upper, by or ()), "SPENT", "LINEAR", "WEEKDAY", "CURRENCY"]
    rows = [
        [
            *(value or "-" for value in each.group.values()),
            *(_text(amount) or "-" for amount in (each.spent, each.linear, each.by_weekday)),
            each.currency,
        ]
        for each in found
    ]
    print_table(columns, rows)


def _text(amount: Decimal | None) -> str | None:
    return None if amount is None else plain_text(amount)
