"""`warmpath admin-keys`: manages keys of the admin API that have a role."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import typer

from gateway.auth.admin_keys import AdminKey, AdminKeys, public_form
from gateway.auth.records import RecordFeed
from gateway.cli.common import AsJson, print_json, print_line, print_stderr, print_table, settings_or_exit, usage_error
from gateway.cli.stored import StorageOption, audited, opened_storage, run_or_exit
from gateway.cli.times import parse_expiry
from gateway.cli.verb_app import verb_app
from gateway.policy.sign_in import Role
from gateway.settings import Settings

app = verb_app(help="Create, list and revoke keys of the admin API.")


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is; recorded in the audit log.")],
    role: Annotated[Role, typer.Option(help="What the key may do.")],
    organisation: Annotated[
        str | None,
        typer.Option(
            metavar="TENANT", help="Tenant to which the key is restricted, with its descendants. Default: none."
        ),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="End of its validity, as in 30d or 2026-12-01. Default: never.")
    ] = None,
    storage: StorageOption = None,
    as_json: AsJson = False,
) -> None:
    """Create a key of the admin API and print it. It is not shown again: only its hash is stored."""
    settings = settings_or_exit(storage=storage)
    with usage_error():
        life_seconds = None if expires is None else parse_expiry(expires)
    details = {"role": role, "organisation": organisation, "expires": expires}

    async def run() -> tuple[str, AdminKey]:
        async with _keys(settings) as keys, audited(settings, "admin-keys create", target=name, details=details):
            return await keys.create(name, role, organisation=organisation, life_seconds=life_seconds)

    key, record = run_or_exit(run())
    if as_json:
        print_json({"key": key, **public_form(record)})
    else:
        print_line(key)
        print_stderr("This key will not be shown again.", style="dim")


@app.command("list")
def list_keys(storage: StorageOption = None, as_json: AsJson = False) -> None:
    """List the keys of the admin API that are in the storage."""
    settings = settings_or_exit(storage=storage)

    async def read() -> list[AdminKey]:
        async with _keys(settings) as keys:
            return await keys.all()

    found = [public_form(each) for each in run_or_exit(read())]
    if as_json:
        print_json(found)
        return
    columns = ("id", "name", "role", "organisation", "state", "expires")
    print_table([name.upper() for name in columns], [[each[name] or "-" for name in columns] for each in found])


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The part of wpa-<id>-<secret> that is not secret.")],
    storage: StorageOption = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a key of the admin API for good."""
    settings = settings_or_exit(storage=storage)

    async def run() -> AdminKey:
        async with _keys(settings) as keys, audited(settings, "admin-keys revoke", target=key_id):
            return await keys.revoke(key_id)

    record = run_or_exit(run())
    if as_json:
        print_json({**public_form(record), "state": "revoked"})
    else:
        print_line(f"admin key {key_id} of {record.name} revoked")


@asynccontextmanager
async def _keys(settings: Settings) -> AsyncIterator[AdminKeys]:
    async with opened_storage(settings, "the admin keys") as storage:
        yield AdminKeys(RecordFeed(storage), settings.key_pepper.get_secret_value(), None)
