"""`warmpath usage reconcile`: the ledger held against what the engines counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.billing.ledger.engine_counters import note, read_marks, spans
from gateway.billing.ledger.reconcile import Compared, compare, share, total
from gateway.billing.reconciliation import marks_of, read_counters
from gateway.cli.common import (
    PROBLEM,
    AsJson,
    complain,
    fail,
    policy_or_exit,
    say,
    say_json,
    say_table,
    settings_or_exit,
    well_formed,
)
from gateway.cli.usage_common import LedgerOption, Since, Until, folder_of, readable
from gateway.deployments.fleet import Fleet
from gateway.policy import Policy
from gateway.policy.fields import parse_share
from gateway.providers import make_provider
from gateway.providers.transport import HTTPTransport
from gateway.settings import SettingsError, resolve_secret

NOTED_IN = "reconciliation"  # beside the replicas' folders
_COUNTS = ("ENGINE", "BILLED", "VAIN", "DRIFT")


def _share(text: str) -> str:
    with well_formed():
        parse_share(text)
    return text


def reconcile(
    since: Since = None,
    until: Until = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Whose deployments are asked; left out: WARMPATH_POLICY.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Ask no server: only what has been noted.")] = False,
    tolerance: Annotated[
        str, typer.Option(callback=_share, metavar="SHARE", help="A drift above this is a problem: exit code 1.")
    ] = "0.1%",
    ledger: LedgerOption = None,
    as_json: AsJson = False,
) -> None:
    """Compare the receipts' tokens with the engines' own counters, by deployment and hour.

    A running gateway notes the counters on the hour. This reads them once more, unless --offline, and notes them too:
    the first time, that is the mark to start from. Of vLLM and the bundled engine the counters are known.

    BILLED is in receipts, and VAIN what servers did for attempts that lost or failed. DRIFT is the engine's count less
    both: positive where work was done that the ledger does not know of. A call that runs across a mark is in one span
    for its engine and in the next for the ledger; the total is what counts.
    """
    folder = folder_of(ledger)
    if not offline:
        named = policy_or_exit(settings_or_exit(policy=policy).policy)
        try:
            asyncio.run(_note_now(named, folder / NOTED_IN))
        except (OSError, SettingsError) as error:
            fail(str(error))
    try:
        found = spans(read_marks(folder), since, until)
    except ValueError as error:
        fail(str(error))
    if not found and not as_json:
        say("there are no two marks to compare between: a running gateway notes one each hour, and so does this")
        return
    with readable():
        compared = compare(folder, found)
    whole = total(compared)
    if as_json:
        hours = [_as_json(one) for one in compared]
        say_json({"spans": hours, "total": [_as_json(one) for one in whole]})
    else:
        _print_table(compared, whole)
    limit = float(parse_share(tolerance))
    drifted = [one for one in whole if _worst(one) > limit]
    for one in drifted:
        complain(f"{one.span.deployment} drifts by {_worst(one):.2%}, more than {tolerance}")
    if drifted:
        raise typer.Exit(PROBLEM)


async def _note_now(policy: Policy, folder: Path) -> None:
    transport = HTTPTransport()
    try:
        fleet = Fleet(lambda deployment: make_provider(deployment, transport, resolve_secret))
        fleet.apply(policy)
        note(folder, marks_of(await read_counters(fleet)))
    finally:
        await transport.aclose()


def _worst(one: Compared) -> float:
    return max(share(one.input_drift, one.span.input), share(one.output_drift, one.span.output))


def _as_json(one: Compared) -> dict[str, Any]:
    return {
        "deployment": one.span.deployment,
        "model": one.span.model,
        "since": one.span.since,
        "until": one.span.until,
        "engine": {"input": one.span.input, "output": one.span.output},
        "ledger": {"input": one.input, "output": one.output},
        "unbilled": {"input": one.unbilled_input, "output": one.unbilled_output},
        "drift": {"input": one.input_drift, "output": one.output_drift},
        "restarted": one.span.restarted,
    }


def _print_table(compared: Sequence[Compared], whole: Sequence[Compared]) -> None:
    columns = ("DEPLOYMENT", "MODEL", "SINCE", "UNTIL", *(f"{what} IN" for what in _COUNTS))
    rows = [_row(one, _minute(one.span.since), _minute(one.span.until)) for one in compared]
    rows += [_row(one, "total", "") for one in whole]
    say_table((*columns, *(f"{what} OUT" for what in _COUNTS)), rows)


def _row(one: Compared, since: str, until: str) -> list[str]:
    restarted = " (restarted)" if one.span.restarted else ""
    span = one.span
    input_counts = (span.input, one.input, one.unbilled_input, one.input_drift)
    output_counts = (span.output, one.output, one.unbilled_output, one.output_drift)
    return [span.deployment, span.model, since, until + restarted, *map(str, input_counts + output_counts)]


def _minute(text: str) -> str:
    """To the minute that is nearest."""
    return f"{datetime.fromisoformat(text) + timedelta(seconds=30):%Y-%m-%dT%H:%M}"
