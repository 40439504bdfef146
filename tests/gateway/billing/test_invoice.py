"""A customer verifies an invoice with one command, or with sha256sum and openssl alone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gateway.billing.books import Books
from gateway.billing.invoice import InvoiceError, make_key, verify_invoice, write_invoice
from gateway.billing.ledger.chain import verify
from tests.gateway.billing.ledger.receipts import a_correction, a_receipt, write_chain

JANUARY = "2027-01-02T00:00:00.000000Z"


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    ledger = tmp_path / "ledger"
    one, other = a_receipt(cost="5"), a_receipt(cost="7", tenant="other")
    write_chain(ledger / "replica", [one, other, a_receipt(cost="0.25"), a_receipt(cost=None, currency=None)])
    write_chain(ledger / "repricing", [a_correction(one, cost="-1")])
    await Books(ledger).close("2026-11", author="ann", now=JANUARY, heads=verify(ledger).heads)
    write_chain(ledger / "later", [a_correction(one, cost="-2", corrected="2027-01-03T00:00:00.000000Z")])
    statement = next(each for each in Books(ledger).statements("2026-11") if each.tenant == "acme")
    make_key(tmp_path / "key.pem")
    return write_invoice(ledger, statement, verify(ledger).heads, tmp_path / "key.pem", tmp_path / "invoice")


async def test_an_invoice_is_valid_and_has_no_rows_of_others(folder: Path) -> None:
    statement = verify_invoice(folder, folder.parent / "key.pub.pem")
    assert statement.total == {"USD": "4.25"}
    assert b"other" not in (folder / "rows.jsonl").read_bytes()
    assert (folder.parent / "key.pem").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("statement.json", b"4.25", b"5.25"),
        ("rows.jsonl", b'"cost":"5"', b'"cost":"6"'),
        ("heads.json", b"replica", b"replicb"),
        ("SHA256SUMS", b"heads", b"haeds"),
    ],
)
async def test_a_changed_file_is_found(folder: Path, name: str, old: bytes, new: bytes) -> None:
    content = (folder / name).read_bytes()
    assert old in content
    (folder / name).write_bytes(content.replace(old, new, 1))
    with pytest.raises(InvoiceError):
        verify_invoice(folder)


async def test_another_key_does_not_verify(folder: Path) -> None:
    other = make_key(folder.parent / "another.pem")
    with pytest.raises(InvoiceError, match="signature"):
        verify_invoice(folder, other)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_sha256sum_and_openssl_verify_it(folder: Path) -> None:
    check = "sha256sum -c SHA256SUMS && openssl pkeyutl -verify -pubin -inkey ../key.pub.pem -rawin -in SHA256SUMS " \
        "-sigfile SHA256SUMS.sig"  # fmt: skip
    done = subprocess.run(["bash", "-c", check], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Verified Successfully" in done.stdout, done.stderr
    (folder / "SHA256SUMS.sig").write_bytes(b"\0" * 64)
    assert subprocess.run(["bash", "-c", check], cwd=folder, capture_output=True, check=False).returncode != 0
