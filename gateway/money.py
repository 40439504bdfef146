"""Money in whole numbers, so that no sum is ever rounded.

An atom is the least that can be owed: one token at the least price that a policy can name, which is a billionth of a
currency unit per million tokens. Atoms are for counting; receipts hold decimal text; storage counts in nanos, which
fit 64 bits.
"""

from __future__ import annotations

from decimal import Decimal

PRICE_DECIMALS = 9
ATOM_DECIMALS = PRICE_DECIMALS + 6  # prices are per million tokens
_ATOMS_PER_UNIT: int = 10**ATOM_DECIMALS
_ATOMS_PER_NANO: int = 10 ** (ATOM_DECIMALS - 9)


def atoms_per_token(price: Decimal) -> int:
    """What one token costs at a price per million tokens. Exact: a price has at most `PRICE_DECIMALS` decimals."""
    return int(price.scaleb(PRICE_DECIMALS))


def text_of(atoms: int) -> str:
    """Exact decimal text without exponent or trailing zeros: `0.00000544`, `12`, `0`. `atoms` is not negative."""
    whole, rest = divmod(atoms, _ATOMS_PER_UNIT)
    return f"{whole}.{rest:0{ATOM_DECIMALS}d}".rstrip("0") if rest else str(whole)


def nanos_of(atoms: int) -> int:
    """Money as storage counts it, in billionths; rounded up, so that a budget is never overspent by rounding."""
    return -(-atoms // _ATOMS_PER_NANO)
