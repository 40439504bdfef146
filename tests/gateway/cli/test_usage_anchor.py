"""`warmpath usage anchor` and `check-anchors`: what they prove about a ledger, also with openssl alone."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.gateway.billing.ledger.receipts import a_receipt, write_chain
from tests.gateway.cli.conftest import Warmpath


@pytest.fixture
def ledger(tmp_path: Path, warmpath: Warmpath) -> Path:
    folder = tmp_path / "ledger"
    write_chain(folder / "gw", [a_receipt(), a_receipt()])
    made = warmpath("usage", "make-key", "key.pem")
    assert made.stdout.splitlines() == ["key.pem: private key, keep it secret", "key.pub.pem: public key"]
    assert warmpath("usage", "adjust", "t", "1", "--reason", "r", "--ledger", str(folder)).exit_code == 0
    return folder


def anchor(warmpath: Warmpath, ledger: Path) -> Path:
    result = warmpath("usage", "anchor", "--to", "elsewhere", "--key", "key.pem", "--ledger", str(ledger), "--json")
    assert result.exit_code == 0, result.output
    return Path(json.loads(result.stdout)["file"])


def check(warmpath: Warmpath, ledger: Path) -> tuple[int, str]:
    result = warmpath("usage", "check-anchors", "elsewhere", "--public-key", "key.pub.pem", "--ledger", str(ledger))
    return result.exit_code, result.output


def test_a_ledger_that_grows_keeps_its_anchors(warmpath: Warmpath, ledger: Path) -> None:
    file = anchor(warmpath, ledger)
    heads = json.loads(file.read_text())
    assert set(heads["ledger"]) == {"gw", "books"} and set(heads["audit"]) == {"cli"}
    warmpath("usage", "adjust", "t", "2", "--reason", "r", "--ledger", str(ledger))
    assert check(warmpath, ledger) == (0, "1 anchors checked, 1 are right\n")


@pytest.mark.parametrize("of", ["ledger/gw", ".warmpath/audit/cli"])
def test_an_end_that_was_cut_off_is_found(warmpath: Warmpath, ledger: Path, tmp_path: Path, of: str) -> None:
    anchor(warmpath, ledger)
    (segment,) = (tmp_path / of).glob("*.jsonl")
    lines = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(b"".join(lines[:-1]))
    assert warmpath("usage", "verify", "--ledger", str(ledger)).exit_code == 0  # the chain alone does not show it
    status, output = check(warmpath, ledger)
    assert status == 1 and f"{of.removeprefix('.warmpath/')} does not contain its head" in output


def test_a_ledger_that_was_written_again_is_found(warmpath: Warmpath, ledger: Path) -> None:
    anchor(warmpath, ledger)
    shutil.rmtree(ledger / "gw")
    write_chain(ledger / "gw", [a_receipt(cost="0"), a_receipt(), a_receipt()])
    status, output = check(warmpath, ledger)
    assert status == 1 and "ledger/gw does not contain its head" in output


def test_an_anchor_that_was_changed_is_found(warmpath: Warmpath, ledger: Path) -> None:
    file = anchor(warmpath, ledger)
    file.write_text(file.read_text().replace("gw", "wg"))
    assert "the signature is not that of this key" in check(warmpath, ledger)[1]
    file.with_suffix(".sig").unlink()
    assert check(warmpath, ledger)[0] == 1


def test_openssl_alone_verifies_an_anchor(warmpath: Warmpath, ledger: Path, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    file = anchor(warmpath, ledger)
    command = [openssl, "pkeyutl", "-verify", "-pubin", "-inkey", str(tmp_path / "key.pub.pem"), "-rawin",
               "-in", str(file), "-sigfile", str(file.with_suffix(".sig"))]  # fmt: skip
    assert b"Verified Successfully" in subprocess.run(command, capture_output=True, check=True).stdout
