"""`warmpath usage reprice` and `compact`: what is written into a ledger beside the gateway's own rows."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from gateway.billing.ledger.compaction import CompactedSegment
from gateway.billing.ledger.compaction import compact as compact_segments
from gateway.billing.repricing import RepricingResult, find_corrections, write_corrections
from gateway.cli.common import AsJson, fail, policy_or_exit, say, say_json, settings_or_exit, warn, well_formed
from gateway.cli.usage_common import LedgerOption, Models, Since, Tenants, Until, folder_of, period_of, readable
from gateway.core.errors import LedgerUnavailable
from gateway.core.money import atoms_to_text
from gateway.core.times import rfc3339
from gateway.policy.fields import parse_duration

MIB = 1024 * 1024


def reprice(
    since: Since = None,
    until: Until = None,
    model: Models = None,
    tenant: Tenants = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Whose prices hold; left out: WARMPATH_POLICY.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be corrected, and write nothing.")] = False,
    ledger: LedgerOption = None,
    as_json: AsJson = False,
) -> None:
    """Correct what was priced wrongly or not at all, by the policy's prices at the time of each call.

    The receipts stay as they are. Corrections are rows of their own, in the chain `repricing`, and `warmpath usage`
    adds up both. The gateways may go on meanwhile; doing it twice changes nothing.
    """
    if since is None or until is None:
        raise typer.BadParameter("--since and --until say which calls")
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
                found = asyncio.run(write_corrections(folder, prices, period, now=now))
        except LedgerUnavailable as error:
            fail(error.message)
    difference = {currency: atoms_to_text(atoms) for currency, atoms in found.difference.items()}
    if as_json:
        counts = {"receipts": found.examined, "corrected": found.corrected, "unpriced": found.unpriced}
        say_json({**counts, "other_currency": found.other_currency, "difference": difference})
        return
    say(f"{found.corrected} of {found.examined} receipts {'would be' if dry_run else 'are'} corrected")
    for currency, amount in difference.items():
        say(f"{amount} {currency}")
    if found.unpriced:
        warn(f"{found.unpriced} have no price in the policy, and stay unpriced")
    if found.other_currency:
        warn(f"{found.other_currency} were priced in another currency than the policy's, and stay as they are")


def _age(text: str) -> timedelta:
    with well_formed():
        return timedelta(seconds=parse_duration(text))


def compact(
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Only segments that were closed so long ago, as in 1d.")
    ] = "1d",
    ledger: LedgerOption = None,
    as_json: AsJson = False,
) -> None:
    """Turn closed segments into Parquet, which is summed up in a tenth of the time and takes less room.

    Every row's bytes are kept, and `warmpath usage verify` proves them as before. The newest two segments of each chain
    stay as they are. The gateways may go on meanwhile.
    """
    before = time.time() - _age(older_than).total_seconds()

    def tell(done: CompactedSegment) -> None:
        if not as_json:
            say(f"{done.file}  {done.rows} rows, {done.bytes_before / MIB:.1f} -> {done.bytes_after / MIB:.1f} MiB")

    with readable():
        compacted = compact_segments(folder_of(ledger), before=before, done=tell)
    if as_json:
        say_json(
            [
                {"file": str(done.file), "rows": done.rows, "bytes": [done.bytes_before, done.bytes_after]}
                for done in compacted
            ]
        )
    elif not compacted:
        say("there is nothing to compact")
