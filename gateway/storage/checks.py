"""Checks of what callers pass to a storage engine. Every engine makes them before an operation begins."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from gateway.storage.base import MAX_AMOUNT, Charge, SliceReport, tenant_of


def check_charges(reservation_id: str, charges: Sequence[Charge]) -> None:
    """Raise `ValueError` if the charges have two tenants, a duplicate key or an amount out of range."""
    _check_keys(tenant_of(reservation_id), tuple([charge.key for charge in charges]))
    for charge in charges:
        if not 0 <= charge.amount <= MAX_AMOUNT:
            raise ValueError(f"an amount is outside 0..2**63-1: {', '.join(map(repr, charges))}")


@lru_cache(maxsize=10_000)  # all calls of a tenant have the same keys
def _check_keys(tenant: str, keys: tuple[str, ...]) -> None:
    for key in keys:
        if tenant_of(key) != tenant:
            raise ValueError(f"the charge {key!r} belongs to another tenant than its reservation ({tenant!r})")
    if len(set(keys)) != len(keys):
        raise ValueError(f"a key occurs twice in the charges: {', '.join(keys)}")


def check_report(tenant: str, report: SliceReport) -> None:
    """Raise `ValueError` if a report has limits of another tenant, a duplicate key or an amount out of range."""
    _check_keys(tenant, tuple([use.charge.key for use in report.uses]))
    for use in report.uses:
        amounts = (use.unused, use.reserved, use.used, use.needed, use.wanted, *[amount for _, amount in use.refunds])
        if not (min(amounts) >= 0 and max(amounts) <= MAX_AMOUNT):
            raise ValueError(f"an amount is outside 0..2**63-1: {use!r}")


def check_actual(reservation_id: str, actual: Sequence[int], *, charges: int | None = None) -> None:
    """Raise `ValueError` if a reservation is settled with an amount out of range.

    If `charges` is given, also raises `ValueError` unless the number of amounts is `charges`.
    """
    if charges is not None and len(actual) != charges:
        raise ValueError(f"{reservation_id} has {charges} charges, but is settled with {len(actual)} amounts")
    for amount in actual:
        if not 0 <= amount <= MAX_AMOUNT:
            raise ValueError(f"{reservation_id} is settled with an amount outside 0..2**63-1: {actual}")
