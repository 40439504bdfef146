"""Shared by the commands that change the storage: opening it, its errors, and the audit log."""

from __future__ import annotations

import asyncio
import getpass
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated, Any, TypeVar

import typer

from gateway.billing.audit import audited_command
from gateway.cli.common import MISUSE, PROBLEM, fail
from gateway.core.errors import BadRequest, GatewayError, LedgerUnavailable, StorageUnavailable
from gateway.settings import Settings
from gateway.storage import open_storage
from gateway.storage.base import Storage

T = TypeVar("T")

StorageOption = Annotated[
    str | None,
    typer.Option("--storage", metavar="URL", help="Storage of the gateways. Default: WARMPATH_STORAGE."),
]


@asynccontextmanager
async def opened_storage(settings: Settings, what: str) -> AsyncIterator[Storage]:
    """Open the storage of the settings. Exits if it is memory, which would lose `what` at once."""
    if settings.storage.startswith("memory:"):
        fail(
            f"memory:// would lose {what} when this command ends: set --storage or WARMPATH_STORAGE, "
            f"as in sqlite:///{settings.data_dir}/warmpath.db",
            code=MISUSE,
        )
    try:
        storage = open_storage(settings.storage)
    except ValueError as error:
        fail(str(error), code=MISUSE)
    try:
        await storage.open()
        yield storage
    finally:
        await storage.close()


def audited(
    settings: Settings, act: str, *, target: str | None = None, details: Mapping[str, Any] | None = None
) -> AbstractAsyncContextManager[None]:
    """Record an act of this command in the audit log, before and after the block."""
    actor = f"{getpass.getuser()} at {settings.replica}"
    return audited_command(settings.audit_dir, f"warmpath {act}", actor=actor, target=target, details=details)


def run_or_exit(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine. Exits with its error's message."""
    try:
        return asyncio.run(work)
    except (StorageUnavailable, LedgerUnavailable) as error:
        fail(error.message)
    except GatewayError as error:
        # Either an invalid option, or a conflict with what the storage contains.
        fail(error.message, code=MISUSE if type(error) is BadRequest else PROBLEM)
