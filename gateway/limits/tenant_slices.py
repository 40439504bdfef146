"""The slices that this gateway has of one tenant's limits. Synchronous: `slices.py` exchanges reports with the storage.

`TenantSlices.take` admits a call: it takes the call's charges from the unused parts of the slices. The amount of a slot
or of money is then reserved until the call ends. The amount of a rate is used at once, and what the call did not use
is refunded when it ends.

A report states what the slices hold (`unused`, `reserved`), what was used since the last report, and by how much they
may grow. Everything that a report takes from a slice leaves it when the report is made, so no call can take it while
the report is in flight. If the answer is lost, the same report is sent again. The storage applies it only once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gateway.storage.base import (
    SLICE_SHARE,
    Charge,
    Grant,
    RateCharge,
    SliceGrant,
    SliceReport,
    SliceUse,
    SlotCharge,
    SpendCharge,
)

LEASE_SECONDS = 6.0  # how long slices outlive a gateway that was killed
LEASE_MARGIN_SECONDS = 1.0  # slices admit no calls in the last part of their lease
IDLE_SECONDS = 1.0  # an unused slice is returned with the next report after this time
SMALL_SECONDS = 5.0  # how long calls are reserved one by one if a slice would be too small
HORIZON_SECONDS = 2.0  # a slice is large enough for the calls of this time
CALLS_MIN = 8  # a slice for fewer typical calls is too small
CALLS_WANTED = 16  # the first slice is for so many calls
MAX_SLICES = 1_000  # of the limits of one root, as of many end users; calls with further limits are reserved one by one


class _Batch:
    """Calls that took an amount of a rate between two reports. `at` is the `used_at` of their report."""

    __slots__ = ("at", "unused")

    def __init__(self) -> None:
        self.at: float | None = None
        self.unused = 0  # refunds of calls that ended while the report was in flight


class LimitSlice:
    """The slice of one limit, in the unit of its charge. Times are monotonic seconds."""

    __slots__ = (
        "batch", "calls", "charge", "demand", "left", "low", "refunds", "reserved", "reserved_batch", "small_until",
        "taken", "taken_at", "typical", "unused", "used",
    )  # fmt: skip

    def __init__(self, charge: Charge, now: float) -> None:
        self.charge = charge
        self.unused = 0
        self.reserved = 0  # by calls in flight, and the cost of calls whose receipt is not reported yet
        self.used = 0  # of a rate, since the last report
        self.refunds: dict[float, int] = {}  # of a rate, by `used_at`
        self.batch = _Batch()  # for the calls that take an amount of a rate now
        self.reserved_batch: _Batch | None = None  # the batch whose report is in flight
        self.left: int | None = None  # what the limit has left outside of the slice, by the last answer
        self.calls = 0  # that have parts of this slice
        self.demand = 0.0  # amount per second
        self.taken = 0  # since the last report
        self.taken_at = now
        self.typical: float = charge.amount  # amount of one call
        self.low = 0  # if less than this is unused, the slice is renewed early
        self.small_until = 0.0

    def same_limit(self, charge: Charge) -> bool:
        """Return whether the limit of a charge is the same as when the slice was leased."""
        known = self.charge
        if charge is known:
            return True
        if type(charge) is RateCharge:
            return type(known) is RateCharge and (charge.limit, charge.period_seconds) == (
                known.limit,
                known.period_seconds,
            )
        return charge.limit == known.limit

    @property
    def is_empty(self) -> bool:
        """Whether nothing must be reported and no call has a part of this slice."""
        return not (self.unused or self.reserved or self.used or self.refunds or self.calls or self.reserved_batch)

    def target(self, replicas: int, now: float) -> int:
        """Return how much of the slice should be unused after the next report."""
        if now < self.small_until or now - self.taken_at > IDLE_SECONDS:
            return 0
        wanted = max(math.ceil(CALLS_WANTED * self.typical), math.ceil(HORIZON_SECONDS * self.demand))
        if self.left is None:
            return wanted
        share = (self.left + self.unused) // (SLICE_SHARE * replicas)
        if share < CALLS_MIN * self.typical:
            self.small_until = now + SMALL_SECONDS
            return 0
        return min(wanted, share)

    def refund(self, amount: int, batch: _Batch) -> None:
        """Return the unused part of a rate that a call of this batch took. Negative: the call used more."""
        if amount < 0:
            self.used -= amount
            self.unused = max(0, self.unused + amount)
        elif batch is self.batch:
            self.used -= amount
            self.unused += amount
        elif batch.at is not None:
            self.refunds[batch.at] = self.refunds.get(batch.at, 0) + amount
        else:
            batch.unused += amount

    def spend(self, reserved: int, actual: int) -> None:
        """Replace a reserved amount of money by the actual cost, which stays reserved until it is reported."""
        self.reserved += actual - reserved
        self.unused = max(0, self.unused + reserved - actual)


class _Part(NamedTuple):
    """What a call has of one slice."""

    position: int  # of the charge
    of: LimitSlice
    amount: int
    batch: _Batch | None  # for rates


class _Cost(NamedTuple):
    """The cost of one call, to be reported."""

    receipt: str | None
    spent: Sequence[tuple[LimitSlice, int]]


class TenantSlices:
    """All slices of one tenant. Not thread-safe. `now` is in monotonic seconds.

    `numbers` numbers the reports of the process. `began` is an event id that is older than all receipts of the process,
    if these are the tenant's first slices in it.
    """

    def __init__(self, tenant: str, process: str, numbers: Iterator[int], began: str | None) -> None:
        self.tenant = tenant
        self.slices: dict[str, LimitSlice] = {}
        self.calls: dict[str, list[_Part]] = {}  # by reservation id
        self.unanswered: SliceReport | None = None
        self.wants_renewal = False
        self._process = process
        self._numbers = numbers
        self._receipt = began  # for the next report
        self._costs: list[_Cost] = []  # in the order of the ledger
        self._reportable = 0  # costs whose receipts are durable
        self._valid_until = 0.0
        self._sent_at = 0.0  # when the last report was sent for the first time
        self._reported_at = 0.0  # when the report before it was made, for the demand

    @property
    def cost_count(self) -> int:
        """The number of calls whose cost is not reported."""
        return len(self._costs)

    @property
    def is_empty(self) -> bool:
        """Whether the tenant has nothing to report, and no calls."""
        return not (self.slices or self.calls or self._costs or self.unanswered)

    def is_due(self, now: float) -> bool:
        """Whether a report has something to say, or the lease must be renewed."""
        if self.unanswered is not None or self._reportable:
            return True
        busy = any(each.unused or each.used or each.refunds for each in self.slices.values())
        return busy or (bool(self.slices) and now - self._sent_at >= LEASE_SECONDS / 3)

    def take(self, reservation_id: str, charges: Sequence[Charge], now: float) -> Grant | None:
        """Take all charges of a call from the slices. Returns None if a slice is too small."""
        if now >= self._valid_until:
            return None
        taken: list[LimitSlice] = []
        for charge in charges:
            found = self.slices.get(charge.key)
            if found is None or found.unused < charge.amount or not found.same_limit(charge):
                return None
            taken.append(found)
        parts: list[_Part] = []
        remaining: list[int] = []
        for index, (charge, each) in enumerate(zip(charges, taken, strict=True)):
            amount = charge.amount
            each.unused -= amount
            each.taken += amount
            each.taken_at = now
            each.typical += (amount - each.typical) / 16
            each.calls += 1
            if type(charge) is RateCharge:
                each.used += amount
                parts.append(_Part(index, each, amount, each.batch))
            else:
                each.reserved += amount
                parts.append(_Part(index, each, amount, None))
            if each.unused < each.low:
                self.wants_renewal = True
            remaining.append(min(charge.limit, each.unused + (each.left or 0)))
        self.calls[reservation_id] = parts
        return Grant(tuple(remaining), leased=True)

    def can_lease(self, charges: Sequence[Charge], now: float) -> bool:
        """Return whether slices may be large enough for these charges. Begins slices of new limits."""
        able = True
        for charge in charges:
            known = self.slices.get(charge.key)
            if known is None:
                if len(self.slices) >= MAX_SLICES:
                    return False
                known = self.slices[charge.key] = LimitSlice(charge, now)
            elif not known.same_limit(charge):  # the policy was reloaded, so the slice ends
                known.charge, known.unused, known.left, known.small_until = charge, 0, None, 0.0
            known.taken_at = now
            able = able and now >= known.small_until
        return able

    def mark_small(self, charges: Sequence[Charge], now: float) -> None:
        """Note that the slices of these limits are too small, after a report has not made them large enough."""
        for charge in charges:
            known = self.slices.get(charge.key)
            if known is not None and known.unused < charge.amount:
                known.small_until = now + SMALL_SECONDS

    @property
    def holds_small(self) -> bool:
        """Whether a slice has an unused part that is too small to be kept."""
        return any(each.unused and each.small_until > self._sent_at for each in self.slices.values())

    def holds_unreported(self, charges: Sequence[Charge]) -> bool:
        """Return whether the storage counts an amount of a limit as held by this gateway, which a report changes.

        Unused amounts become free. The use of a rate that is not reported yet ends only with its period.
        """
        slices = [known for charge in charges if (known := self.slices.get(charge.key)) is not None]
        return any(known.unused or known.used for known in slices)

    def withhold(self, charges: Sequence[Charge], now: float) -> None:
        """Return the unused parts of these limits with the next report, and reserve calls one by one for a while."""
        for charge in charges:
            if (known := self.slices.get(charge.key)) is not None:
                known.small_until = now + SMALL_SECONDS

    def give_back(self) -> None:
        """Return all unused parts with the next report, for good."""
        for each in self.slices.values():
            each.small_until = math.inf

    def bill(self, reservation_id: str, actual: Sequence[int], receipt: str | None) -> bool:
        """Account for the actual usage of a call. Its slot stays reserved. Returns False if it has no slices.

        Calls are billed in the order of their receipts in the ledger.
        """
        parts = self.calls.get(reservation_id)
        if parts is None:
            return False
        spent: list[tuple[LimitSlice, int]] = []
        slots: list[_Part] = []
        for part in parts:
            kind = type(part.of.charge)
            if kind is SlotCharge:
                slots.append(part)
                continue
            part.of.calls -= 1
            used = actual[part.position]
            if part.batch is not None:
                part.of.refund(part.amount - used, part.batch)
            else:
                part.of.spend(part.amount, used)
                spent.append((part.of, used))
        if spent and (receipt is not None or any(used for _, used in spent)):
            self._costs.append(_Cost(receipt, spent))
        if slots:
            self.calls[reservation_id] = slots
        else:
            del self.calls[reservation_id]
        return True

    def release_slots(self, reservation_id: str) -> bool:
        """Free the slots of a call. Returns False if it has none."""
        parts = self.calls.get(reservation_id, [])
        others = [part for part in parts if type(part.of.charge) is not SlotCharge]
        for part in parts:
            if type(part.of.charge) is SlotCharge:
                part.of.calls -= 1
                part.of.reserved -= part.amount
                part.of.unused += part.amount
        if others:
            self.calls[reservation_id] = others
        else:
            self.calls.pop(reservation_id, None)
        return len(others) < len(parts)

    def charge_cost(self, charges: Sequence[SpendCharge], receipt: str, now: float) -> None:
        """Charge the cost of a recovered call, which took nothing from the slices."""
        spent: list[tuple[LimitSlice, int]] = []
        for charge in charges:
            known = self.slices.setdefault(charge.key, LimitSlice(charge, now))
            known.spend(0, charge.amount)
            spent.append((known, charge.amount))
        self._costs.append(_Cost(receipt, spent))

    def receipts_are_durable(self, count: int) -> None:
        """Let the next report contain the first `count` costs."""
        self._reportable = min(count, len(self._costs))

    def make_report(self, waiting: Sequence[Sequence[Charge]], replicas: int, now: float) -> SliceReport:
        """Make the next report. `waiting` has the charges of the calls that wait for its answer."""
        needed: dict[str, int] = {}
        for charges in waiting:
            for charge in charges:
                needed[charge.key] = needed.get(charge.key, 0) + charge.amount
        costs, self._costs = self._costs[: self._reportable], self._costs[self._reportable :]
        self._reportable = 0
        spent: dict[LimitSlice, int] = {}
        for cost in costs:
            for each, amount in cost.spent:
                spent[each] = spent.get(each, 0) + amount
        if now >= self._valid_until:
            for each in self.slices.values():
                each.unused = 0  # the storage may have given it to others
        elapsed = max(now - self._reported_at, 0.05)
        uses = [
            self._use(each, needed.get(key, 0), spent.get(each, 0), replicas, elapsed, now)
            for key, each in self.slices.items()
        ]
        self._sent_at = self._reported_at = now
        self.wants_renewal = False
        receipt = next((cost.receipt for cost in reversed(costs) if cost.receipt is not None), self._receipt)
        self._receipt = None
        self.unanswered = SliceReport(self._process, next(self._numbers), tuple(uses), receipt, replicas)
        return self.unanswered

    def _use(self, each: LimitSlice, needed: int, spent: int, replicas: int, elapsed: float, now: float) -> SliceUse:
        each.demand = max(each.taken / elapsed, each.demand / 2)
        each.taken = 0
        target = each.target(replicas, now) + needed
        each.unused = min(each.unused, target)
        each.reserved -= spent
        used, each.used = each.used + spent, 0
        refunds, each.refunds = tuple(each.refunds.items()), {}
        if isinstance(each.charge, RateCharge):
            each.reserved_batch, each.batch = each.batch, _Batch()
        missing = max(0, needed - each.unused)
        return SliceUse(each.charge, each.unused, each.reserved, used, refunds, missing, target - each.unused)

    def apply(self, report: SliceReport, grant: SliceGrant, now: float) -> None:
        """Apply the answer to the last report."""
        self.unanswered = None
        self._valid_until = self._sent_at + LEASE_SECONDS - LEASE_MARGIN_SECONDS
        for use, granted, left, used_at in zip(report.uses, grant.granted, grant.remaining, grant.used_at, strict=True):
            each = self.slices[use.charge.key]
            batch, each.reserved_batch = each.reserved_batch, None
            if batch is not None:
                batch.at = used_at
                if batch.unused:
                    each.refunds[used_at] = each.refunds.get(used_at, 0) + batch.unused
            if each.same_limit(use.charge):  # else the next report returns it
                each.left = left
                each.unused += granted
                each.low = each.unused // 4
                if 0 < each.unused < CALLS_MIN * each.typical:
                    each.small_until = max(each.small_until, now + SMALL_SECONDS)
            if each.is_empty and now - each.taken_at > IDLE_SECONDS:
                del self.slices[use.charge.key]
