"""Phase 4: a call reserves the most it may use of every limit of its tenant, or of none; afterwards it pays the truth.

A reservation is a lease in shared storage. `Limiter` keeps the leases of long calls alive, and settles later what could
not be settled at once; whatever it can not do, the end of the lease does.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import Protocol
from urllib.parse import quote

import msgspec

from gateway.errors import GatewayError, StorageUnavailable
from gateway.money import nanos_of
from gateway.storage.base import Charge, Counters, LeaseCharge, Refused
from gateway.types import Call, Operation, Usage

LEASE_SECONDS = 30.0  # after a crash without return, places and money are held so long
EXTEND_SECONDS = LEASE_SECONDS / 3
RETRY_SECONDS = 1.0
MAX_UNSETTLED = 10_000
MAX_AT_ONCE = 128  # background operations under way at the same time, so that calls come between


class Estimate(msgspec.Struct, frozen=True):
    """The most that a call may use. `output_is_guessed` where the call itself sets no bound."""

    input_tokens: int
    output_tokens: int
    output_is_guessed: bool
    cost_nanos: int
    now: float


class Limit(Protocol):
    """One kind of limit, without state."""

    def charge(self, call: Call, estimate: Estimate) -> Charge | None:
        """What the call reserves; None where its tenant has no such limit. See `charge_key` for the key."""

    def actual(self, usage: Usage, cost_nanos: int) -> int:
        """What it used in the end, in the unit of the charge."""

    def refuse(self, call: Call, charge: Charge, refused: Refused) -> GatewayError: ...

    def headers(self, charge: Charge, remaining: int) -> dict[str, str]:
        """What a client is told of the limit, in OpenAI's names."""


class Reservation:
    """What an admitted call holds. Ended by the first `settle` or `release`; whatever comes later changes nothing.

    None of them raises, and none waits longer than a storage operation may take. A cancelled end is made up for.
    """

    def __init__(
        self,
        end: Callable[[Sequence[int]], Awaitable[None]],
        limits: Sequence[Limit],
        headers: Mapping[str, str],
        leave: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.headers = headers  # for the reply
        self._end = end
        self._leave = leave  # where it holds a place
        self._limits = limits
        self._ended = False

    async def leave(self) -> None:
        """The work is over: its place is free for the next call, although its bill is not settled yet."""
        if self._leave is not None and not self._ended:
            leave, self._leave = self._leave, None
            await leave()

    async def settle(self, usage: Usage, cost_nanos: int) -> None:
        if not self._ended:
            self._ended = True
            await self._end([limit.actual(usage, cost_nanos) for limit in self._limits])

    async def release(self) -> None:
        """Nothing was used; that the call was made still counts as a request."""
        await self.settle(Usage(), 0)


async def _nothing(actual: Sequence[int]) -> None:
    pass


UNLIMITED = Reservation(_nothing, (), {})
"""Of a call that no limit applies to; shared by all of them."""


class Limiter:
    """Start and stop it with the application. The numbers are for telemetry."""

    def __init__(self, counters: Counters, limits: Sequence[Limit], *, clock: Callable[[], float] = time.time) -> None:
        self._counters = counters
        self._limits = limits
        self._clock = clock
        self._open: dict[str, float] = {}  # when each open reservation was made or last extended
        self._unsettled: dict[str, Sequence[int]] = {}  # oldest first
        self._keeper: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self.leases_lost = 0  # ran out while their calls went on: the store was away too long
        self.settlements_dropped = 0  # left to the end of their leases: the store was away far too long
        self.store_failures = 0

    @property
    def open_reservations(self) -> int:
        return len(self._open)

    @property
    def unsettled(self) -> int:
        """Reservations that ended and wait for the store to be told."""
        return len(self._unsettled)

    async def start(self) -> None:
        if self._keeper is None:
            self._stopping.clear()
            self._keeper = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Tries once more to settle what is left."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            self._stopping.set()
            await keeper
            await self.retry_unsettled()

    async def admit(self, call: Call) -> Reservation:
        """Raises LimitReached, BudgetSpent, BadRequest for a call that could never fit, or StorageUnavailable."""
        if not call.principal.tenant.limits.any:
            return UNLIMITED
        now = self._clock()
        estimate = estimate_of(call, now)
        charged = [(limit, charge) for limit in self._limits if (charge := limit.charge(call, estimate)) is not None]
        name = f"{_tenant_part(call.principal.tenant.name)}/{call.id}"
        charges = [charge for _, charge in charged]
        try:
            verdict = await self._counters.reserve(name, charges, lease_seconds=LEASE_SECONDS, now=now)
        except (StorageUnavailable, asyncio.CancelledError) as error:
            # It may have been reserved without our hearing of it.
            self._put_off(name, [0] * len(charges))
            self.store_failures += isinstance(error, StorageUnavailable)
            raise
        if isinstance(verdict, Refused):
            limit, charge = charged[verdict.index]
            raise limit.refuse(call, charge, verdict)
        self._open[name] = now
        headers: dict[str, str] = {}
        for (limit, charge), remaining in zip(charged, verdict.remaining, strict=True):
            headers.update(limit.headers(charge, remaining))
        leave = partial(self._leave, name) if any(isinstance(charge, LeaseCharge) for charge in charges) else None
        return Reservation(partial(self._end, name), [limit for limit, _ in charged], headers, leave)

    async def _leave(self, name: str) -> None:
        try:
            await self._counters.leave(name, now=self._clock())
        except StorageUnavailable:  # settling frees it
            self.store_failures += 1

    async def _end(self, name: str, actual: Sequence[int]) -> None:
        self._open.pop(name, None)
        try:
            await self._counters.settle(name, actual, now=self._clock())
        except StorageUnavailable:
            self.store_failures += 1
            self._put_off(name, actual)
        except asyncio.CancelledError:
            self._put_off(name, actual)  # the store settles it once, however often it is asked
            raise

    def _put_off(self, name: str, actual: Sequence[int]) -> None:
        if len(self._unsettled) == MAX_UNSETTLED:
            self._unsettled.pop(next(iter(self._unsettled)))
            self.settlements_dropped += 1
        self._unsettled[name] = actual

    async def _keep(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS):
                    await self._stopping.wait()
            await self.retry_unsettled()
            await self.extend_due()

    async def retry_unsettled(self) -> None:
        """Until all are settled, or the store is away."""
        while self._unsettled:
            some = list(islice(self._unsettled.items(), MAX_AT_ONCE))
            now = self._clock()
            ended = await self._all([partial(self._counters.settle, name, actual, now=now) for name, actual in some])
            for (name, _), answer in zip(some, ended, strict=True):
                if answer is not None:
                    self._unsettled.pop(name, None)
            if None in ended:
                return

    async def extend_due(self) -> None:
        """Keep alive what has been open for a third of its lease; the other two are for trying again."""
        now = self._clock()
        due = [name for name, since in self._open.items() if now >= since + EXTEND_SECONDS]
        for start in range(0, len(due), MAX_AT_ONCE):
            some = due[start : start + MAX_AT_ONCE]
            extend = partial(self._counters.extend, lease_seconds=LEASE_SECONDS, now=now)
            held = await self._all([partial(extend, name) for name in some])
            for name, answer in zip(some, held, strict=True):
                if answer and name in self._open:
                    self._open[name] = now
                elif answer is False and self._open.pop(name, None) is not None:
                    self.leases_lost += 1
            if None in held:
                return

    async def _all(self, operations: Sequence[Callable[[], Awaitable[bool]]]) -> list[bool | None]:
        """The answers of the store, None where it was away."""
        answers = await asyncio.gather(*(_unless_away(operation) for operation in operations))
        self.store_failures += answers.count(None)
        return answers


async def _unless_away(operation: Callable[[], Awaitable[bool]]) -> bool | None:
    try:
        return await operation()
    except StorageUnavailable:
        return None


def estimate_of(call: Call, now: float) -> Estimate:
    """The whole prompt uncached and the longest answer, at the dearest server that the call may reach."""
    output_tokens = call.max_output_tokens
    if call.operation is Operation.EMBEDDING:
        output_tokens = 0
    guessed = output_tokens is None
    if output_tokens is None:
        output_tokens = call.principal.tenant.limits.default_output_tokens
    cost = _dearest_cost(call, call.prompt_tokens_estimate, output_tokens)
    return Estimate(call.prompt_tokens_estimate, output_tokens, guessed, cost, now)


def _dearest_cost(call: Call, input_tokens: int, output_tokens: int) -> int:
    dearest = 0
    for price in call.policy.prices_by_model[call.model.name]:
        computed, _, output = price.atoms
        dearest = max(dearest, input_tokens * computed + output_tokens * output)
    return nanos_of(dearest)


@lru_cache(maxsize=40_000)  # a handful for each tenant
def charge_key(tenant: str, what: str) -> str:
    """Keys and reservations of one tenant begin with its name, as storage wants it."""
    return f"{_tenant_part(tenant)}/{what}"


@lru_cache(maxsize=10_000)
def _tenant_part(name: str) -> str:
    return quote(name, safe="")
