"""`warmpath audit`: shows and verifies the audit log, which has every administrative act."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.billing.audit import AuditEntry, read_audit
from gateway.billing.ledger.chain import RowError, verify
from gateway.cli.common import AsJson, fail, print_json, print_line, print_table, settings_or_exit
from gateway.cli.times import ledger_time
from gateway.cli.verb_app import verb_app

app = verb_app(help="Show and verify the audit log.")

Folder = Annotated[
    Path | None,
    typer.Option("--audit", metavar="DIR", help="Folder of the audit log. Default: WARMPATH_DATA_DIR/audit."),
]


@app.command("list")
def list_acts(
    since: Annotated[
        str | None,
        typer.Option(callback=ledger_time, metavar="TIME", help="Only acts at this time or later, as in 2h."),
    ] = None,
    until: Annotated[
        str | None, typer.Option(callback=ledger_time, metavar="TIME", help="Only acts before this time.")
    ] = None,
    actor: Annotated[str, typer.Option(metavar="NAME", help="Only acts whose actor contains this text.")] = "",
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """List all administrative acts, the earliest first. Lists those at the admin API and those by commands.

    An act without a result was cut off, for example because its process was killed.
    """
    try:
        found = read_audit(_folder(folder))
    except RowError as error:
        fail(f"the audit log was changed: {error}")
    shown = [
        each
        for each in found
        if (since or "") <= each.act.at and (until is None or each.act.at < until) and actor in each.act.actor
    ]
    if as_json:
        print_json([each.public_form() for each in shown])
        return
    rows = [
        (
            each.act.at[:19],
            each.act.actor,
            each.act.role or "-",
            each.act.act,
            each.act.target or "-",
            _result(each.status),
        )
        for each in shown
    ]
    print_table(("TIME", "ACTOR", "ROLE", "ACT", "TARGET", "RESULT"), rows)


@app.command("verify")
def verify_acts(folder: Folder = None, as_json: AsJson = False) -> None:
    """Check that no row of the audit log was changed, removed or added.

    Prints the head of each chain. Compare the heads with copies that are kept elsewhere: a chain alone cannot show that
    its end was cut off.
    """
    checked = verify(_folder(folder))
    broken = [str(each) for each in checked.all_broken]
    if as_json:
        print_json({"rows": checked.rows, "heads": checked.heads, "broken": broken})
    else:
        print_line(f"{checked.rows} rows checked")
        for chain, head in sorted(checked.heads.items()):
            print_line(f"{chain} {head}")
    if broken:
        fail("\n".join(broken))


def _folder(given: Path | None) -> Path:
    return given or settings_or_exit().audit_dir


def _row(entry: AuditEntry) -> tuple[str, ...]:
    act = entry.act
    return act.at[:19], act.actor, act.role or "-", act.act, act.target or "-", _result(entry.status)


def _result(status: int | None) -> str:
    return "cut off" if status is None else str(status) if status else "failed"
