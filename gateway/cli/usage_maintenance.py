"""`warmpath usage reprice` and `compact`: the commands that write to a ledger. Gateways may keep running meanwhile."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from gateway.billing.ledger.compaction import CompactedSegment
from gateway.billing.ledger.compaction import compact as compact_segments
from gateway.billing.ledger.reader import Period
from gateway.billing.repricing import RepricingResult, find_corrections, write_corrections
from gateway.cli.common import AsJson, fail, policy_or_exit, print_json, print_line, settings_or_exit, usage_error, warn
from gateway.cli.stored import audited
from gateway.cli.times import Since, Until
from gateway.cli.usage_common import LedgerOption, Models, Tenants, folder_of, period_of, readable, warn_of_set_aside
from gateway.core.errors import LedgerUnavailable
from gateway.core.money import atoms_to_text
from gateway.core.times import rfc3339
from gateway.policy import Policy
from gateway.policy.fields import parse_duration

MIB = 1024 * 1024


def reprice(
    since: Since = None,
    until: Until = None,
    model: Models = None,
    tenant: Tenants = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Policy with the prices. Default: WARMPATH_POLICY.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be corrected, and write nothing.")
    ] = False,
    ledger: LedgerOption = None,
    as_json: AsJson = False,
) -> None:
    """Correct receipts with a wrong price or none. Uses the policy's prices for the time of each call.

    Receipts are not changed. Corrections are separate rows, in the chain `repricing`, and `warmpath usage` sums up
    both. Gateways may keep running. Running it twice changes nothing.
    """
    if since is None or until is None:
        raise typer.BadParameter("--since and --until are required")
    folder, period = folder_of(ledger), period_of(since, until, tenant, model)
    prices = policy_or_exit(settings_or_exit(policy=policy).policy)
    now = rfc3339(time.time_ns())
    with readable():
        try:
            if dry_run:
                found = RepricingResult()
                for _ in find_corrections(folder, prices, period, now=now, result=found):
                    pass
            else:
                found = asyncio.run(_reprice(folder, prices, period, now))
        except LedgerUnavailable as error:
            fail(error.message)
    difference = {currency: atoms_to_text(atoms) for currency, atoms in found.difference.items()}
    if as_json:
        counts = {"receipts": found.examined, "corrected": found.corrected, "unpriced": found.unpriced}
        counts["unreadable"] = len(found.unreadable)
        print_json({**counts, "other_currency": found.other_currency, "difference": difference})
        return
    print_line(f"{found.corrected} of {found.examined} receipts {'would be ' if dry_run else ''}corrected")
    for currency, amount in difference.items():
        print_line(f"{amount} {currency}")
    warn_of_set_aside(found.unreadable)
    if found.failed:
        warn(f"{found.failed} receipts not corrected: they have values that cannot be priced")
    if found.unpriced:
        warn(f"{found.unpriced} receipts stay unpriced: the policy has no price for them")
    if found.other_currency:
        warn(f"{found.other_currency} receipts not corrected: their currency is not the policy's")


async def _reprice(folder: Path, prices: Policy, period: Period, now: str) -> RepricingResult:
    details = {"since": period.since, "until": period.until, "policy": prices.hash}
    async with audited(settings_or_exit(), "usage reprice", details=details):
        return await write_corrections(folder, prices, period, now=now)


def _age(text: str) -> timedelta:
    with usage_error():
        return timedelta(seconds=parse_duration(text))


def compact(
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Only segments closed at least this long ago, as in 1d.")
    ] = "1d",
    ledger: LedgerOption = None,
    as_json: AsJson = False,
) -> None:
    """Convert closed segments to Parquet. It is smaller, and is summed up in a tenth of the time.

    The bytes of every row are preserved, and `warmpath usage verify` still checks them. The newest two segments of each
    chain are not converted. Gateways may keep running.
    """
    before = time.time() - _age(older_than).total_seconds()

    def report(done: CompactedSegment) -> None:
        if not as_json:
            print_line(
                f"{done.file}  {done.rows} rows, {done.bytes_before / MIB:.1f} -> {done.bytes_after / MIB:.1f} MiB"
            )

    with readable():
        compacted = compact_segments(folder_of(ledger), before=before, done=report)
    if as_json:
        print_json(
            [
                {"file": str(done.file), "rows": done.rows, "bytes": [done.bytes_before, done.bytes_after]}
                for done in compacted
            ]
        )
    elif not compacted:
        print_line("nothing to compact")
