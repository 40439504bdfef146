"""Invoices that a customer can verify without this software: a folder with a statement, its rows, and a signature.

    statement.json   what the tenant owes for the month
    rows.jsonl       the receipts and corrections behind it, in the bytes of the ledger; each has its own hash
    heads.json       the head of each chain of the ledger, which covers all rows before it
    SHA256SUMS       the SHA-256 of these files, for `sha256sum -c`
    SHA256SUMS.sig   the Ed25519 signature of SHA256SUMS
    public.pem       the key that verifies it; compare it with the one that you know

`sha256sum` and `openssl` verify the files. `verify_invoice` also checks the hash of each row, and that the rows add up
to the statement. The heads show later that the ledger has not been rewritten: a ledger with another history has
other heads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from gateway.billing.books import Statement, bounds, total_of
from gateway.billing.ledger.chain import RowError, chains, check_row, segments
from gateway.billing.ledger.compaction import read_lines
from gateway.billing.ledger.rows import Correction
from gateway.billing.ledger.rows import decode as decode_row
from gateway.types import Receipt

SIGNED = ("statement.json", "rows.jsonl", "heads.json")


class InvoiceError(Exception):
    """The invoice cannot be made, or does not verify. The message says which file and why."""


def make_key(file: Path) -> Path:
    """Write a new private key with mode 0600, and its public key beside it. Returns the latter's path."""
    key = Ed25519PrivateKey.generate()
    file.touch(mode=0o600, exist_ok=False)
    file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = file.with_suffix(".pub.pem")
    public.write_bytes(_public_pem(key.public_key()))
    return public


def load_private_key(file: Path) -> Ed25519PrivateKey:
    """Read a key that `make_key` wrote. Raises `InvoiceError` for any other content, and `OSError`."""
    try:
        key = load_pem_private_key(file.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise InvoiceError(f"{file}: is no private key without a password: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InvoiceError(f"{file}: is no Ed25519 key")
    return key


def load_public_key(file: Path) -> Ed25519PublicKey:
    """Read a public key. Raises `InvoiceError` if it is no Ed25519 key, and `OSError`."""
    try:
        key = load_pem_public_key(file.read_bytes())
    except ValueError as error:
        raise InvoiceError(f"{file.name}: is no public key: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise InvoiceError(f"{file.name}: is no Ed25519 key")
    return key


def write_invoice(ledger: Path, statement: Statement, heads: Mapping[str, str], key_file: Path, folder: Path) -> Path:
    """Write an invoice into a new folder. Raises `InvoiceError` and `OSError`."""
    key = load_private_key(key_file)
    folder.mkdir(parents=True)
    (folder / "statement.json").write_bytes(msgspec.json.format(msgspec.json.encode(statement)) + b"\n")
    with (folder / "rows.jsonl").open("wb") as rows:
        for chain in chains(ledger):
            for segment in segments(chain):
                rows.writelines(line for line in read_lines(segment) if _belongs(line, statement))
    (folder / "heads.json").write_bytes(msgspec.json.encode(dict(heads), order="sorted") + b"\n")
    sums = "".join(f"{_sha256(folder / name)}  {name}\n" for name in SIGNED).encode()
    (folder / "SHA256SUMS").write_bytes(sums)
    (folder / "SHA256SUMS.sig").write_bytes(key.sign(sums))
    (folder / "public.pem").write_bytes(_public_pem(key.public_key()))
    return folder


def _belongs(line: bytes, statement: Statement) -> bool:
    """Whether a line is a receipt or correction of the tenant for the month, or was carried into it."""
    if b'"kind":"receipt"' not in line and b'"kind":"correction"' not in line:
        return False
    row = decode_row(line)
    if not isinstance(row, Receipt) or row.tenant != statement.tenant:
        return False
    since, until = bounds(statement.period)
    return since <= row.finished < until or (isinstance(row, Correction) and since <= row.corrected < until)


def verify_invoice(folder: Path, public_key: Path | None = None) -> Statement:
    """Check an invoice's signature, files, rows and sums. `public_key` is the customer's copy of the key.

    Raises `InvoiceError` at the first thing that is wrong.
    """
    try:
        key = load_public_key(public_key or folder / "public.pem")
        sums, signature = (folder / "SHA256SUMS").read_bytes(), (folder / "SHA256SUMS.sig").read_bytes()
        key.verify(signature, sums)
        expected = "".join(f"{_sha256(folder / name)}  {name}\n" for name in SIGNED)
        if sums.decode() != expected:
            raise InvoiceError("a file was changed: its SHA-256 is not in SHA256SUMS")
        statement = msgspec.json.decode((folder / "statement.json").read_bytes(), type=Statement)
    except InvalidSignature:
        raise InvoiceError("SHA256SUMS.sig: the signature is not that of this key") from None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise InvoiceError(str(error)) from None
    if total_of(statement.lines) != statement.total:
        raise InvoiceError("statement.json: the lines do not add up to the total")
    _check_rows(folder / "rows.jsonl", statement)
    return statement


def _check_rows(file: Path, statement: Statement) -> None:
    """Check each row's own hash, and that the rows of an unchanged month add up to its usage."""
    since, until = bounds(statement.period)
    sums: dict[str, Decimal] = {}
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                check_row(line)
                row = decode_row(line)
            except (RowError, msgspec.MsgspecError) as error:
                raise InvoiceError(f"rows.jsonl:{number}: {error}") from None
            if not isinstance(row, Receipt) or row.tenant != statement.tenant:
                raise InvoiceError(f"rows.jsonl:{number}: is no row of {statement.tenant}")
            written = row.corrected if isinstance(row, Correction) else row.finished
            frozen = statement.closed is not None and written > statement.closed
            if since <= row.finished < until and row.cost is not None and row.currency is not None and not frozen:
                sums[row.currency] = sums.get(row.currency, Decimal(0)) + Decimal(row.cost)
    owed: dict[str, Decimal] = {}
    for each in statement.lines:
        if each.kind == "usage":
            owed[each.currency] = owed.get(each.currency, Decimal(0)) + Decimal(each.amount)
    wrong = [currency for currency in {**owed, **sums} if owed.get(currency, 0) != sums.get(currency, 0)]
    if wrong:
        raise InvoiceError(
            f"the rows add up to {sums.get(wrong[0], 0)} {wrong[0]}, and the statement says {owed.get(wrong[0], 0)}"
        )


def _public_pem(key: Ed25519PublicKey) -> bytes:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
