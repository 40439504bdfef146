"""Money in whole numbers, so that no sum is ever rounded.

An atom is the least that can be owed: one token at the least price that a policy can name, which is a billionth of a
currency unit per million tokens. Atoms are for counting; receipts hold decimal text; storage counts in nanos, which
fit 64 bits.
"""

from __future__ import annotations

from decimal import Context, Decimal, Inexact, InvalidOperation

PRICE_DECIMALS = 9
ATOM_DECIMALS = PRICE_DECIMALS + 6  # prices are per million tokens
_ATOMS_PER_NANO: int = 10 ** (ATOM_DECIMALS - 9)
_EXACT = Context(prec=100, traps=[Inexact, InvalidOperation])


def atoms_per_token(price: Decimal) -> int:
    """What one token costs at a price per million tokens. Exact: a price has at most `PRICE_DECIMALS` decimals."""
    return int(price.scaleb(PRICE_DECIMALS))


def atoms_to_text(atoms: int) -> str:
    """Exact decimal text without exponent or trailing zeros: `0.00000544`, `12`, `0`, `-1.5`."""
    if atoms < 0:
        return f"-{atoms_to_text(-atoms)}"
    digits = str(atoms).zfill(ATOM_DECIMALS + 1)
    return f"{digits[:-ATOM_DECIMALS]}.{digits[-ATOM_DECIMALS:]}".rstrip("0").rstrip(".")


def atoms_to_nanos(atoms: int) -> int:
    """Money as storage counts it, in billionths; rounded up, so that a budget is never overspent by rounding."""
    return -(-atoms // _ATOMS_PER_NANO)


def text_to_atoms(text: str) -> int:
    """What `atoms_to_text` has written. Raises `ValueError` for what is no money, or finer than an atom."""
    try:
        return int(Decimal(text).scaleb(ATOM_DECIMALS, _EXACT).to_integral_exact(context=_EXACT))
    except (ArithmeticError, ValueError) as error:
        raise ValueError(f"{text!r} is no amount of money") from error


def plain_text(amount: Decimal) -> str:
    """All of its decimals, no exponent, no empty zeros."""
    text = f"{amount:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
