from decimal import Context, Decimal, Inexact, localcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.money import ATOM_DECIMALS, atoms_per_token, atoms_to_nanos, atoms_to_text, plain_text, text_to_atoms


@pytest.mark.parametrize(
    ("atoms", "text"),
    [
        (0, "0"),
        (1, "0.000000000000001"),
        (5_440_000_000, "0.00000544"),
        (10**15, "1"),
        (12 * 10**15, "12"),
        (10**16 + 10**14, "10.1"),
        (-5_440_000_000, "-0.00000544"),
    ],
)
def test_atoms_as_decimal_text(atoms: int, text: str) -> None:
    assert atoms_to_text(atoms) == text


@given(st.integers(0, 10**40))
def test_decimal_text_is_exact(atoms: int) -> None:
    with localcontext(Context(prec=100, traps=[Inexact])):
        assert Decimal(atoms_to_text(atoms)).scaleb(ATOM_DECIMALS) == atoms


@given(st.decimals(0, 10**9, places=9))
def test_a_million_tokens_cost_the_price(price: Decimal) -> None:
    with localcontext(Context(prec=100)):
        assert Decimal(atoms_to_text(atoms_per_token(price) * 1_000_000)) == price


@given(st.integers(0, 10**30))
def test_nanos_are_rounded_up(atoms: int) -> None:
    assert 0 <= atoms_to_nanos(atoms) * 10**6 - atoms < 10**6


@given(st.integers(-(10**30), 10**30))
def test_decimal_text_is_parsed_exactly(atoms: int) -> None:
    assert text_to_atoms(atoms_to_text(atoms)) == atoms
    assert plain_text(Decimal(atoms_to_text(atoms))) == atoms_to_text(atoms)


@pytest.mark.parametrize("text", ["", "much", "0.0000000000000001", "NaN"])
def test_invalid_amounts_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="not an amount of money"):
        text_to_atoms(text)
