"""`warmpath prices`: imports prices, compares those of two policies, and checks receipts against the policies' history.

The history has every policy that was in force (`gateway.policy.history`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml

from gateway.billing.ledger.reader import bill_rows
from gateway.billing.repricing import reprice
from gateway.cli.common import (
    PROBLEM,
    AsJson,
    fail,
    policy_or_exit,
    print_json,
    print_line,
    print_table,
    settings_or_exit,
    usage_error,
    verb_app,
    warn,
)
from gateway.cli.times import Since, Until, parse_time
from gateway.cli.usage_common import LedgerOption, Models, Tenants, folder_of, period_of, readable
from gateway.core.money import atoms_to_text, plain_text
from gateway.policy import Policy, Price
from gateway.policy.history import NotInHistory, load
from gateway.policy.litellm_prices import UnreadablePrices, as_policy, prices_of, read_file

SHOWN_MAX = 20  # wrong receipts that are listed; all are counted
CONDITIONS = ("latency_class", "service_tier", "above", "region", "start", "until")

app = verb_app(help="Import, compare and check prices.")


@app.command("import")
def import_prices(
    form: Annotated[Literal["litellm"], typer.Argument(metavar="FORM", help="litellm: its public JSON file.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="The price file.")],
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="MODEL", help="Name of a model in the file. Repeatable. Default: all."),
    ] = None,
    version: Annotated[
        str, typer.Option(metavar="VERSION", help="Version of the prices, which every receipt records.")
    ] = "litellm",
    start: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="TIME", help="The prices apply to calls from this time on, as in tomorrow or 2026-12-01."
        ),
    ] = None,
) -> None:
    """Print the prices of models as YAML, for `price` in a policy. Costs that a policy cannot express are named."""
    common: dict[str, Any] = {"version": version}
    if start is not None:
        with usage_error():
            common["from"] = parse_time(start, forward=True)
    try:
        entries = read_file(file.read_bytes())
        missing = [name for name in model or () if name not in entries]
        if missing:
            fail(f"{file} has no model {missing[0]!r}")
        printed: dict[str, Any] = {}
        for name in model or entries:
            prices, ignored = prices_of(entries[name], **common)
            if prices:
                printed[name] = {"price": as_policy(prices)}
            if ignored and (prices or model):
                warn(f"{name}: not imported: {', '.join(ignored)}")
    except UnreadablePrices as error:
        fail(f"{file}: {error}")
    typer.echo(yaml.safe_dump(printed, sort_keys=False, width=110), nl=False)


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", exists=True, dir_okay=False, help="Policy file.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", exists=True, dir_okay=False, help="Policy file.")],
    as_json: AsJson = False,
) -> None:
    """Show how the prices of two policies differ. Lists models, deployments, and the calls to which a price applies."""
    before, after = _prices(policy_or_exit(old)), _prices(policy_or_exit(new))
    changes = []
    for key in [*before, *(key for key in after if key not in before)]:
        one, other = before.get(key, {}), after.get(key, {})
        for name in [*one, *(name for name in other if name not in one)]:
            if one.get(name) != other.get(name):
                changes.append([*key, name, one.get(name), other.get(name)])
    if as_json:
        names = ("model", "deployment", "applies_to", "field", "old", "new")
        print_json([dict(zip(names, change, strict=True)) for change in changes])
    elif changes:
        columns = ["MODEL", "DEPLOYMENT", "APPLIES TO", "FIELD", "OLD", "NEW"]
        print_table(columns, [["-" if value is None else value for value in change] for change in changes])
    else:
        print_line("the prices are the same")


def _prices(policy: Policy) -> dict[tuple[str, str, str], dict[str, str]]:
    """The fields of each price of a policy, by model, deployment and condition."""
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for (model, deployment), prices in policy.price_lists.items():
        for price in prices.prices:
            found.setdefault((model, deployment, _condition(price)), dict(_amounts(price)))
    for model, prices in policy.cache_prices.items():
        for price in prices.prices:
            found.setdefault((model, "response cache", _condition(price)), dict(_amounts(price)))
    return found


def _condition(price: Price) -> str:
    values = {name: getattr(price, name) for name in CONDITIONS}
    shown = [
        f"{name} {', '.join(value) if isinstance(value, tuple) else value}"
        for name, value in values.items()
        if value is not None
    ]
    return "; ".join(shown) or "all calls"


def _amounts(price: Price) -> Iterator[tuple[str, str]]:
    for name in type(price).model_fields:
        value = getattr(price, name)
        if name not in CONDITIONS and value is not None and (value or name == "input"):
            yield name, value if isinstance(value, str) else plain_text(value)


@app.command()
def check(
    since: Since = None,
    until: Until = None,
    model: Models = None,
    tenant: Tenants = None,
    history: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the policies' history. Default: DATA_DIR/policies.")
    ] = None,
    ledger: LedgerOption = None,
    as_json: AsJson = False,
) -> None:
    """Compute the cost of every receipt again and compare. Uses the prices of the policy that was in force.

    If a cost differs, the exit code is 1. Receipts whose policy is not in the history are counted.
    """
    folder = history or settings_or_exit().data_dir / "policies"
    policies: dict[str, Policy | None] = {}
    right, missing, wrong = 0, 0, list[dict[str, str | None]]()
    with readable() as set_aside:
        period = period_of(since, until, tenant, model)
        for row in bill_rows(folder_of(ledger), period, set_aside=set_aside):
            if row["kind"] != "receipt" or (row["deployment"] is None and row["source"] != "cache"):
                continue
            known = row["policy_hash"]
            if known not in policies:
                policies[known] = _from_history(known, folder)
            policy = policies[known]
            if policy is None:
                missing += 1
                continue
            expected, stated = _cost(policy, row), None if row["cost"] is None else plain_text(row["cost"])
            if expected == stated:
                right += 1
            else:
                wrong.append({"event_id": row["event_id"], "stated": stated, "computed": expected})
    if as_json:
        print_json({"right": right, "wrong": wrong, "without_policy": missing})
    else:
        print_line(f"{right} receipts have the price of their policy")
        for each in wrong[:SHOWN_MAX]:
            warn(f"{each['event_id']}: states {each['stated']}, computed {each['computed']}")
        if missing:
            warn(f"{missing} receipts not checked: their policies are not in {folder}")
    if wrong:
        raise typer.Exit(PROBLEM)


def _from_history(policy_hash: str, folder: Path) -> Policy | None:
    try:
        return load(policy_hash, folder)
    except NotInHistory as error:
        warn(str(error))
        return None


def _cost(policy: Policy, row: dict[str, Any]) -> str | None:
    bill = reprice(policy, row)
    if bill is None:
        return "0" if row["source"] == "cache" else None
    return None if bill.cost is None else atoms_to_text(bill.cost)
