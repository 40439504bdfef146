"""`warmpath usage anchor` and `check-anchors`: signed heads of all chains, kept elsewhere."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from gateway.billing.ledger.chain import verify
from gateway.billing.ledger.compaction import read_lines
from gateway.cli.common import AsJson, fail, print_json, print_line, settings_or_exit
from gateway.cli.usage_common import LedgerOption, folder_of
from gateway.core.times import rfc3339

Audit = Annotated[
    Path | None,
    typer.Option("--audit", metavar="DIR", help="Folder of the audit log. Default: WARMPATH_DATA_DIR/audit."),
]


def anchor(
    to: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the anchors, where the ledger's owner cannot write.")
    ],
    key: Annotated[
        Path, typer.Option(metavar="FILE", exists=True, dir_okay=False, help="Private key, from `usage make-key`.")
    ],
    ledger: LedgerOption = None,
    audit: Audit = None,
    as_json: AsJson = False,
) -> None:
    """Sign the heads of all chains. They are those of the ledger and the audit log, and are written to another place.

    Run it each day or hour. If the ledger is rewritten or its end is cut off later, `check-anchors` shows it.
    """
    anchors, folder, acts = _anchors(), folder_of(ledger), audit or settings_or_exit().audit_dir
    checked, checked_acts = verify(folder, read_lines), verify(acts)
    if broken := [*checked.all_broken, *checked_acts.all_broken]:
        fail("a chain was changed, so nothing is signed:\n" + "\n".join(map(str, broken)))
    try:
        file = anchors.write_anchor(to, key, at=rfc3339(time.time_ns()), ledger=checked.heads, audit=checked_acts.heads)
    except anchors.InvoiceError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{to}: {error.strerror}")
    if as_json:
        print_json({"file": str(file), "ledger": checked.heads, "audit": checked_acts.heads})
    else:
        print_line(f"{file}: heads of {len(checked.heads) + len(checked_acts.heads)} chains")


def check(
    anchors_folder: Annotated[Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="The anchors.")],
    public_key: Annotated[
        Path, typer.Option(metavar="FILE", exists=True, dir_okay=False, help="The key that you know.")
    ],
    ledger: LedgerOption = None,
    audit: Audit = None,
    as_json: AsJson = False,
) -> None:
    """Check the anchors. Verifies each signature, and that each chain still contains its head.

    A head is also missing if its row is older than WARMPATH_LEDGER_KEEP_DAYS. Exits with code 1 if anything is wrong.
    """
    anchors, folder, acts = _anchors(), folder_of(ledger), audit or settings_or_exit().audit_dir
    try:
        found = anchors.check_anchors(anchors_folder, public_key, ledger=folder, audit=acts)
    except anchors.InvoiceError as error:
        fail(str(error))
    if not found:
        fail(f"{anchors_folder}: has no anchors")
    wrong = [f"{each.file.name}: {fault}" for each in found for fault in each.faults]
    if as_json:
        print_json([{"file": str(each.file), "faults": each.faults} for each in found])
    else:
        print_line(f"{len(found)} anchors checked, {sum(not each.faults for each in found)} are right")
    if wrong:
        fail("\n".join(wrong))


def _anchors() -> ModuleType:
    """The module that signs. Imported here, because the package `cryptography` is optional."""
    try:
        return importlib.import_module("gateway.billing.anchors")
    except ModuleNotFoundError:
        fail("the package cryptography is not installed: pip install 'warmpath[signing]'")
