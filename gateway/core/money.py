"""Represents money as integers (atoms and nanos), so that sums are exact.

An atom is the smallest amount that a call can cost: one token at the lowest price that a policy can state, a billionth
of a currency unit per million tokens. The gateway computes in atoms. Receipts contain decimal text. The storage counts
in nanos (billionths of a currency unit), which fit into 64 bits.
"""

from __future__ import annotations

from decimal import Context, Decimal, Inexact, InvalidOperation

PRICE_DECIMALS = 9
ATOM_DECIMALS = PRICE_DECIMALS + 6  # prices are per million tokens
_ATOMS_PER_NANO: int = 10 ** (ATOM_DECIMALS - 9)
_EXACT = Context(prec=100, traps=[Inexact, InvalidOperation])


def atoms_per_token(price: Decimal) -> int:
    """The cost of one token, in atoms, from a price per million tokens. Also: of a millionth of a priced unit.

    Exact, since a price has at most `PRICE_DECIMALS` decimals.
    """
    return int(price.scaleb(PRICE_DECIMALS))


def atoms_to_text(atoms: int) -> str:
    """Atoms as exact decimal text without exponent or trailing zeros: `0.00000544`, `12`, `0`, `-1.5`."""
    if atoms < 0:
        return f"-{atoms_to_text(-atoms)}"
    digits = str(atoms).zfill(ATOM_DECIMALS + 1)
    return f"{digits[:-ATOM_DECIMALS]}.{digits[-ATOM_DECIMALS:]}".rstrip("0").rstrip(".")


def atoms_to_nanos(atoms: int) -> int:
    """Atoms as nanos (billionths), rounded up, so that rounding never overspends a budget."""
    return -(-atoms // _ATOMS_PER_NANO)


def text_to_atoms(text: str) -> int:
    """Parse decimal text as `atoms_to_text` writes it. Raises `ValueError` for other text, or a fraction of an atom."""
    try:
        return int(Decimal(text).scaleb(ATOM_DECIMALS, _EXACT).to_integral_exact(context=_EXACT))
    except (ArithmeticError, ValueError) as error:
        raise ValueError(f"{text!r} is not an amount of money") from error


def plain_text(amount: Decimal) -> str:
    """A decimal as text, exact, without exponent or trailing zeros."""
    text = f"{amount:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
