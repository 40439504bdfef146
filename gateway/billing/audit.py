"""The audit log: every administrative act, in chains of hashes like the ledger's (`gateway.billing.ledger.chain`).

    <data>/audit/<replica>/    the acts at the admin API of one gateway process
    <data>/audit/cli/          the acts of the `warmpath` command on this machine

An act is two rows: one before anything is changed, and one with the result. If the first cannot be made durable, the
act is refused. So a change without a row is impossible, and an act without a result was cut off. `warmpath audit
verify` checks the chains, and nothing ever removes a row.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from gateway.billing.ledger import Ledger
from gateway.billing.ledger.chain import chains, check_row, segments
from gateway.billing.ledger.rows import Act, ActResult, decode
from gateway.core.errors import GatewayError, LedgerUnavailable
from gateway.core.ids import new_event_id
from gateway.core.supervision import Supervisor
from gateway.core.times import rfc3339

CLI_CHAIN = "cli"
LOCK_SECONDS = 5.0  # how long a command waits for another one's act
LOCK_RETRY_SECONDS = 0.05
DONE, FAILED = 200, 0  # results of commands


class AuditLog:
    """Appends acts to one chain. Call `open` before use and `close` after use. Must be used on one event loop."""

    def __init__(self, directory: Path, chain: str, supervisor: Supervisor | None = None) -> None:
        self._chain = Ledger(directory, chain, supervisor=supervisor)

    def open(self) -> None:
        """Lock the chain and find its end. Raises `LedgerUnavailable`."""
        self._chain.open()

    async def close(self) -> None:
        """Make all rows durable and release the lock."""
        await self._chain.close()

    async def begin(
        self,
        act: str,
        *,
        actor: str,
        role: str,
        target: str | None = None,
        organisation: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> str:
        """Record an act before it is done. Returns its id when the row is durable. Raises `LedgerUnavailable`."""
        row = Act(
            event_id=new_event_id(), at=rfc3339(time.time_ns()), actor=actor, role=role, act=act, target=target,
            organisation=organisation, details=None if details is None else dict(details),
        )  # fmt: skip
        self._chain.check()
        self._chain.append(row)
        await self._chain.durable(flush_now=True)
        return row.event_id

    def note(self, act: str, *, actor: str, target: str) -> None:
        """Record an act that is done already, such as a new policy file. It is durable soon."""
        row = Act(event_id=new_event_id(), at=rfc3339(time.time_ns()), actor=actor, role="", act=act, target=target)
        result = ActResult(event_id=new_event_id(), act_id=row.event_id, at=row.at, status=DONE)
        with contextlib.suppress(LedgerUnavailable):  # the ledger logs the row
            self._chain.append(row)
            self._chain.append(result)

    async def end(self, act_id: str, status: int) -> None:
        """Record how an act ended. Raises `LedgerUnavailable`."""
        row = ActResult(event_id=new_event_id(), act_id=act_id, at=rfc3339(time.time_ns()), status=status)
        self._chain.append(row)
        await self._chain.durable(flush_now=True)


@asynccontextmanager
async def audited_command(
    directory: Path, act: str, *, actor: str, target: str | None = None, details: Mapping[str, Any] | None = None
) -> AsyncIterator[None]:
    """Record an act of the `warmpath` command around the block. Raises `LedgerUnavailable` before anything is done."""
    log, until = AuditLog(directory, CLI_CHAIN), time.monotonic() + LOCK_SECONDS
    while True:
        try:
            log.open()
            break
        except LedgerUnavailable:
            if time.monotonic() > until:
                raise
        log = AuditLog(directory, CLI_CHAIN)
        await asyncio.sleep(LOCK_RETRY_SECONDS)
    try:
        act_id = await log.begin(act, actor=actor, role="cli", target=target, details=details)
        try:
            yield
        except GatewayError as error:
            await log.end(act_id, error.status)
            raise
        except BaseException:
            await log.end(act_id, FAILED)
            raise
        await log.end(act_id, DONE)
    finally:
        await log.close()


class AuditEntry(msgspec.Struct, frozen=True):
    """One act with its result. `status` is None if the act was cut off."""

    chain: str
    act: Act
    status: int | None

    def public_form(self) -> dict[str, Any]:
        """Return the entry for the admin API and the CLI."""
        act = msgspec.structs.asdict(self.act)
        return {"object": "warmpath.act", "id": act.pop("event_id"), **act, "status": self.status, "chain": self.chain}


def read_audit(directory: Path) -> list[AuditEntry]:
    """Return all acts, the earliest first. Raises `RowError` at a row that was changed."""
    acts: list[tuple[str, Act]] = []
    results: dict[str, int] = {}
    for chain in chains(directory):
        for row in _rows(chain):
            if isinstance(row, Act):
                acts.append((chain.name, row))
            elif isinstance(row, ActResult):
                results[row.act_id] = row.status
    acts.sort(key=lambda each: each[1].event_id)
    return [AuditEntry(chain, act, results.get(act.event_id)) for chain, act in acts]


def _rows(chain: Path) -> Iterator[Any]:
    for segment in segments(chain):
        with segment.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    return  # is being written
                check_row(line)
                yield decode(line)
