"""Anchors: signed copies of the heads of all chains, which are kept where the ledger cannot be changed.

A chain alone cannot show that its end was cut off, or that all of it was written again. An anchor can: a file with the
heads at one time, and its Ed25519 signature beside it, in a folder that the operator chooses, for example on another
machine or in a bucket with object lock.

    heads-2026-11-26T12-00-00Z.json    {"at": ..., "ledger": {chain: head, ...}, "audit": {chain: head, ...}}
    heads-2026-11-26T12-00-00Z.sig     the signature of the bytes of that file

`openssl pkeyutl -verify` checks the signature. `check_anchors` also checks that each chain still contains its head.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from cryptography.exceptions import InvalidSignature

from gateway.billing.invoice import InvoiceError, load_private_key, load_public_key
from gateway.billing.ledger.chain import RowError, chains, check_row, segments
from gateway.billing.ledger.compaction import read_lines
from gateway.billing.ledger.segment_locks import lock_for_reading


class Anchor(msgspec.Struct, frozen=True):
    """The heads of the chains of the ledger and of the audit log at one time (RFC 3339)."""

    at: str
    ledger: dict[str, str]
    audit: dict[str, str]


class CheckedAnchor(NamedTuple):
    """One anchor's file, and what is wrong with it: a chain that does not contain its head, for example."""

    file: Path
    faults: tuple[str, ...]


def write_anchor(folder: Path, key_file: Path, *, at: str, ledger: Mapping[str, str], audit: Mapping[str, str]) -> Path:
    """Write an anchor and its signature. Returns its file. Raises `InvoiceError` for a bad key, and `OSError`."""
    key = load_private_key(key_file)
    folder.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.encode(Anchor(at, dict(sorted(ledger.items())), dict(sorted(audit.items())))) + b"\n"
    file = folder / f"heads-{at[:19].replace(':', '-')}Z.json"
    with file.open("xb") as anchor:
        anchor.write(content)
    file.with_suffix(".sig").write_bytes(key.sign(content))
    return file


def check_anchors(folder: Path, public_key: Path, *, ledger: Path, audit: Path) -> list[CheckedAnchor]:
    """Check all anchors of a folder, the earliest first. Raises `InvoiceError` for a bad key."""
    key = load_public_key(public_key)
    found: list[tuple[Path, Anchor | None, list[str]]] = []
    for file in sorted(folder.glob("heads-*.json")):
        content, faults, anchor = file.read_bytes(), list[str](), None
        try:
            key.verify(file.with_suffix(".sig").read_bytes(), content)
            anchor = msgspec.json.decode(content, type=Anchor)
        except InvalidSignature:
            faults.append("the signature is not that of this key")
        except (OSError, msgspec.MsgspecError) as error:
            faults.append(str(error))
        found.append((file, anchor, faults))
    for root, of in ((ledger, "ledger"), (audit, "audit")):
        wanted: dict[str, set[str]] = {}
        for _, anchor, _ in found:
            for chain, head in (getattr(anchor, of) if anchor is not None else {}).items():
                wanted.setdefault(chain, set()).add(head)
        kept = {chain: _kept_heads(root / chain, heads) for chain, heads in wanted.items()}
        for _, anchor, faults in found:
            heads = getattr(anchor, of) if anchor is not None else {}
            faults += [f"{of}/{chain} does not contain its head" for chain in heads if heads[chain] not in kept[chain]]
    return [CheckedAnchor(file, tuple(faults)) for file, _, faults in found]


def _kept_heads(chain: Path, wanted: set[str]) -> set[str]:
    """Return those of the wanted hashes that rows of a chain have, up to its first row that was changed."""
    kept: set[str] = set()
    if chain not in chains(chain.parent):
        return kept
    with lock_for_reading([chain]):
        before: str | None = None
        for segment in segments(chain):
            for line in read_lines(segment):
                try:
                    prev, digest = check_row(line)
                except RowError:
                    return kept
                if before not in (None, prev):
                    return kept
                before = digest
                if digest in wanted:
                    kept.add(digest)
    return kept


__all__ = ["Anchor", "CheckedAnchor", "InvoiceError", "check_anchors", "write_anchor"]
