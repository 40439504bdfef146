"""Lines of an invoice are whole cents that add up, and the lines of an organisation are those of all below it."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gateway.billing.books import Books
from gateway.billing.invoice_lines import decimals_of, invoice_lines, rounded
from tests.gateway.billing.ledger.receipts import a_receipt, write_chain

AMOUNTS = st.lists(st.decimals(-100, 1000, places=15), max_size=30)


@given(AMOUNTS, st.sampled_from(["USD", "JPY", "KWD"]))
def test_rounded_lines_add_up_to_the_rounded_sum(amounts: list[Decimal], currency: str) -> None:
    decimals = decimals_of(currency)
    unit = Decimal(1).scaleb(-decimals)
    found = rounded(amounts, decimals)
    assert sum(found, Decimal(0)) == sum(amounts, Decimal(0)).quantize(unit, ROUND_HALF_UP)
    assert all(abs(after - before) <= unit for before, after in zip(amounts, found, strict=True))


def test_an_organisation_s_statement_has_all_tenants_below_it(tmp_path: Path) -> None:
    below = {"parents": ("acme", "science")}
    rows = [
        a_receipt(tenant="lab", cost="1.004", **below),
        a_receipt(tenant="science", cost="2.004", parents=("acme",), model_asked="small"),
        a_receipt(tenant="acme", cost="3.004"),
        a_receipt(tenant="other", cost="50"),
        a_receipt(tenant="moved", cost="7", **below),
        a_receipt(tenant="moved", cost="7", parents=("other",), finished="2026-11-25T10:00:00.000000Z"),
        a_receipt(tenant="later", cost="9", finished="2026-12-25T10:00:00.000000Z", **below),
    ]
    write_chain(tmp_path / "replica", rows)
    statement = Books(tmp_path).statement_of("acme", "2026-11")
    assert [each.tenant for each in statement.tenants] == ["acme", "lab", "science"]
    assert (statement.total, statement.closed) == ({"USD": "6.012"}, None)
    assert Books(tmp_path).statement_of("science", "2026-11").total == {"USD": "3.008"}

    lines = invoice_lines(statement.tenants, "acme")
    assert {(line.invoice, line.customer) for line in lines} == {("acme-2026-11-USD", "acme")}
    assert {(line.period_start, line.period_end) for line in lines} == {("2026-11-01", "2026-11-30")}
    assert sorted(line.amount for line in lines) == ["1.00", "2.00", "3.01"]
    assert [line.customer for line in invoice_lines(statement.tenants)] == ["acme", "lab", "science"]
