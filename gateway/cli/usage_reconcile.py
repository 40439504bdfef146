"""`warmpath usage reconcile`: compares the ledger with the engines' token counters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.billing.drift_monitor import read_counters, samples_of
from gateway.billing.ledger.engine_counters import append_samples, intervals, read_samples
from gateway.billing.ledger.reconcile import Comparison, compare, drift_ratio, totals_by_deployment
from gateway.cli.common import (
    PROBLEM,
    AsJson,
    fail,
    policy_or_exit,
    print_json,
    print_line,
    print_stderr,
    print_table,
    settings_or_exit,
    usage_error,
)
from gateway.cli.times import Since, Until
from gateway.cli.usage_common import LedgerOption, folder_of, readable
from gateway.deployments.fleet import Fleet
from gateway.policy import Policy
from gateway.policy.fields import parse_share
from gateway.providers import make_provider
from gateway.providers.transport import HTTPTransport
from gateway.settings import SettingsError, resolve_secret

SAMPLES_FOLDER = "reconciliation"  # beside the replicas' folders
_COUNTS = ("ENGINE", "BILLED", "UNBILLED", "DRIFT")


def share(text: str) -> str:
    """Check that an option is a share, as 0.1%. Exits if it is not."""
    with usage_error():
        parse_share(text)
    return text


def reconcile(
    since: Since = None,
    until: Until = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Policy with the deployments. Default: WARMPATH_POLICY.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Use recorded samples only, and read no engine.")] = False,
    tolerance: Annotated[
        str, typer.Option(callback=share, metavar="SHARE", help="Exit with code 1 if the drift is above this share.")
    ] = "0.1%",
    ledger: LedgerOption = None,
    as_json: AsJson = False,
) -> None:
    """Compare receipts with the engines' own counters. Compares tokens, by deployment and hour.

    A running gateway records a sample of the counters each hour. This command records one, too, unless --offline is
    set; the first sample is only a starting point. Supported engines: vLLM and the bundled engine. If one of them does
    not answer, the command names it and exits with code 1.

    BILLED tokens are in receipts. UNBILLED tokens were computed for cancelled or failed attempts. DRIFT is the engine's
    count minus both: if it is positive, the ledger does not know of some work. A call that runs across a sample
    counts in one interval for the engine and in the next one for the ledger, so judge by the total.
    """
    folder = folder_of(ledger)
    unread: list[str] = []
    if not offline:
        reconciled = policy_or_exit(settings_or_exit(policy=policy).policy)
        try:
            unread = asyncio.run(_record_sample(reconciled, folder / SAMPLES_FOLDER))
        except (OSError, SettingsError) as error:
            fail(str(error))
    with readable() as set_aside:
        found = intervals(read_samples(folder, set_aside=set_aside), since, until)
    for name in unread:
        print_stderr(f"{name}: its counters could not be read, so what it did since its last sample is not compared")
    if not found and not as_json:
        print_line(
            "nothing to compare: fewer than two samples. A gateway records one each hour, this command one per run"
        )
        if unread:
            raise typer.Exit(PROBLEM)
        return
    with readable() as set_aside:
        compared = compare(folder, found, set_aside=set_aside)
    whole = totals_by_deployment(compared)
    if as_json:
        hours = [_as_json(one) for one in compared]
        print_json({"spans": hours, "total": [_as_json(one) for one in whole], "unread": unread})
    else:
        _print_table(compared, whole)
    limit = float(parse_share(tolerance))
    # Totals only: a call that runs across a sample drifts in both of its intervals.
    drifted = [one for one in whole if _worst(one) > limit]
    for one in drifted:
        print_stderr(f"{one.interval.deployment}: drift {_worst(one):.2%}, more than {tolerance}")
    if drifted or unread:
        raise typer.Exit(PROBLEM)


async def _record_sample(policy: Policy, folder: Path) -> list[str]:
    """Record a sample. Returns the names of the deployments that did not answer."""
    transport = HTTPTransport()
    try:
        fleet = Fleet(lambda deployment: make_provider(deployment, transport, resolve_secret))
        fleet.apply(policy)
        samples, unread = await read_counters(fleet)
        append_samples(folder, samples_of(samples))
        return unread
    finally:
        await transport.aclose()


def _worst(one: Comparison) -> float:
    return max(drift_ratio(one.input_drift, one.interval.input), drift_ratio(one.output_drift, one.interval.output))


def _as_json(one: Comparison) -> dict[str, Any]:
    return {
        "deployment": one.interval.deployment,
        "model": one.interval.model,
        "since": one.interval.since,
        "until": one.interval.until,
        "engine": {"input": one.interval.input, "output": one.interval.output},
        "ledger": {"input": one.input, "output": one.output},
        "unbilled": {"input": one.unbilled_input, "output": one.unbilled_output},
        "drift": {"input": one.input_drift, "output": one.output_drift},
        "restarted": one.interval.restarted,
    }


def _print_table(compared: Sequence[Comparison], whole: Sequence[Comparison]) -> None:
    columns = ("DEPLOYMENT", "MODEL", "SINCE", "UNTIL", *(f"{what} IN" for what in _COUNTS))
    rows = [_row(one, _minute(one.interval.since), _minute(one.interval.until)) for one in compared]
    rows += [_row(one, "total", "") for one in whole]
    print_table((*columns, *(f"{what} OUT" for what in _COUNTS)), rows)


def _row(one: Comparison, since: str, until: str) -> list[str]:
    restarted = " (restarted)" if one.interval.restarted else ""
    interval = one.interval
    input_counts = (interval.input, one.input, one.unbilled_input, one.input_drift)
    output_counts = (interval.output, one.output, one.unbilled_output, one.output_drift)
    return [interval.deployment, interval.model, since, until + restarted, *map(str, input_counts + output_counts)]


def _minute(text: str) -> str:
    """The time rounded to the nearest minute."""
    return f"{datetime.fromisoformat(text) + timedelta(seconds=30):%Y-%m-%dT%H:%M}"
