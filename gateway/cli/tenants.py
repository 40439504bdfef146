"""`warmpath tenants`: manages the tenants in the storage: organisations, projects, teams and users."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import yaml

from gateway.auth.pepper import CHECK_ID
from gateway.auth.records import RecordFeed
from gateway.auth.tenant_directory import TenantDirectory
from gateway.auth.tenants import TenantRegistry
from gateway.cli.common import (
    MISUSE,
    AsJson,
    fail,
    policy_or_exit,
    print_json,
    print_line,
    print_table,
    settings_or_exit,
)
from gateway.cli.stored import StorageOption, audited, opened_storage, run_or_exit
from gateway.cli.verb_app import verb_app
from gateway.core.errors import BadRequest, Conflict
from gateway.settings import Settings
from gateway.storage.base import KeyRecord, Storage

FORMAT = 1  # of exports

app = verb_app(help="Create, list, change, delete, export and import tenants.")

TenantName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the tenant.")]
Parent = Annotated[
    str | None, typer.Option(metavar="TENANT", help='Tenant to which it belongs. "" removes the parent.')
]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", metavar="MODEL", help="Model that it may use. Repeatable. Default: all of its parent's."),
]
LimitsYaml = Annotated[
    str | None, typer.Option("--limits", metavar="YAML", help="Limits, as in '{requests: 60/1m, budget: {amount: 5}}'.")
]
CacheGroup = Annotated[str | None, typer.Option(metavar="GROUP", help="Tenants of one group share prefix caches.")]


@app.command()
def create(
    name: TenantName,
    parent: Parent = None,
    model: Models = None,
    limits: LimitsYaml = None,
    cache_group: CacheGroup = None,
    storage: StorageOption = None,
    as_json: AsJson = False,
) -> None:
    """Create a tenant in the storage. All gateways know it within a second.

    A tenant of the policy wins over one of the storage, so its name must not be in the policy (WARMPATH_POLICY).
    """
    fields = _fields(parent, model, limits, cache_group)
    settings = settings_or_exit(storage=storage)

    async def run() -> dict[str, Any]:
        async with _registry(settings) as registry, audited(settings, "tenants create", target=name, details=fields):
            return await registry.create({"name": name, **fields})

    _show(run_or_exit(run()), "created", as_json=as_json)


@app.command("set")
def change(
    name: TenantName,
    parent: Parent = None,
    model: Models = None,
    limits: LimitsYaml = None,
    cache_group: CacheGroup = None,
    storage: StorageOption = None,
    as_json: AsJson = False,
) -> None:
    """Change a tenant in the storage. What is not given stays; --limits replaces all of its limits.

    If the outermost ancestor changes, its budgets start again.
    """
    fields = _fields(parent, model, limits, cache_group)
    if parent == "":
        fields["parent"] = None
    settings = settings_or_exit(storage=storage)

    async def run() -> dict[str, Any]:
        async with _registry(settings) as registry, audited(settings, "tenants set", target=name, details=fields):
            return await registry.change(name, fields)

    _show(run_or_exit(run()), "changed", as_json=as_json)


@app.command()
def delete(name: TenantName, storage: StorageOption = None, as_json: AsJson = False) -> None:
    """Delete a tenant from the storage. Its keys are refused from then on; its receipts stay in the ledger."""
    settings = settings_or_exit(storage=storage)

    async def run() -> dict[str, Any]:
        async with _registry(settings) as registry, audited(settings, "tenants delete", target=name):
            return await registry.delete(name)

    _show(run_or_exit(run()), "deleted", as_json=as_json)


@app.command("list")
def list_tenants(
    parent: Annotated[str | None, typer.Option(metavar="TENANT", help="Only the children of this tenant.")] = None,
    storage: StorageOption = None,
    as_json: AsJson = False,
) -> None:
    """List the tenants of the policy and of the storage."""
    settings = settings_or_exit(storage=storage)

    async def read() -> list[dict[str, Any]]:
        async with _registry(settings) as registry:
            return [registry.get(name) for name in registry.names()]

    found = [each for each in run_or_exit(read()) if parent in (None, each["parent"])]
    if as_json:
        print_json(found)
        return
    rows = [
        (each["name"], each["parent"] or "-", each["source"], ", ".join(each["limits"]) or "none")
        for each in found
    ]  # fmt: skip
    print_table(("NAME", "PARENT", "SOURCE", "LIMITS"), rows)


@app.command("export")
def export_tenants(storage: StorageOption = None) -> None:
    """Print the storage's tenants and keys as JSON. `warmpath tenants import` reads it. Keys are hashes."""
    settings = settings_or_exit(storage=storage)

    async def read() -> dict[str, Any]:
        async with opened_storage(settings, "the tenants") as opened, _registry_of(opened, settings) as registry:
            keys = [msgspec.to_builtins(each) for each in await opened.list_keys() if each.id != CHECK_ID]
            return {"warmpath_tenants": FORMAT, "tenants": registry.export(), "keys": keys}

    print_json(run_or_exit(read()))


@app.command("import")
def import_tenants(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An export, or - for stdin.")],
    storage: StorageOption = None,
    as_json: AsJson = False,
) -> None:
    """Create or replace the tenants of an export, and add its keys.

    A tenant that the policy has is skipped, and so is a key that the storage has. Keys work if WARMPATH_KEY_PEPPER is
    that of the storage which they come from. An import that was interrupted can be repeated.
    """
    settings = settings_or_exit(storage=storage)
    content = _read_export(file)

    async def run() -> dict[str, Any]:
        counts = {"tenants": len(content.tenants), "keys": len(content.keys)}
        async with (
            opened_storage(settings, "the tenants") as opened,
            _registry_of(opened, settings) as registry,
            audited(settings, "tenants import", details=counts),
        ):
            skipped = []
            for fields in content.tenants:
                try:
                    await registry.put(fields)
                except Conflict as error:
                    skipped.append(error.message)
                except BadRequest as error:
                    raise BadRequest(f"the tenant {fields.get('name')!r}: {error.param}: {error.message}") from None
            added = sum([await opened.change_key(msgspec.structs.replace(each, revision=0)) for each in content.keys])
            return {"tenants": len(content.tenants) - len(skipped), "keys": added, "skipped": skipped}

    result = run_or_exit(run())
    if as_json:
        print_json(result)
        return
    print_line(f"{result['tenants']} tenants and {result['keys']} keys imported")
    for message in result["skipped"]:
        print_line(f"skipped: {message}")


class _Export(msgspec.Struct):
    warmpath_tenants: int
    tenants: list[dict[str, Any]]
    keys: list[KeyRecord] = []


def _read_export(file: Path) -> _Export:
    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        export = msgspec.json.decode(content, type=_Export)
    except OSError as error:
        fail(f"{file}: {error.strerror}", code=MISUSE)
    except msgspec.MsgspecError as error:
        fail(f"{file}: not an export of `warmpath tenants export`: {error}", code=MISUSE)
    if export.warmpath_tenants != FORMAT:
        fail(f"{file}: has the format {export.warmpath_tenants}; this version of Warmpath reads {FORMAT}", code=MISUSE)
    return export


def _fields(
    parent: str | None, models: list[str] | None, limits: str | None, cache_group: str | None
) -> dict[str, Any]:
    """The fields that options give, as in a policy."""
    try:
        own = None if limits is None else yaml.safe_load(limits)
    except yaml.YAMLError as error:
        raise typer.BadParameter(f"limits must be YAML as in a policy: {error}") from None
    given = {"parent": parent or None, "models": models or None, "limits": own, "cache_group": cache_group}
    return {name: value for name, value in given.items() if value is not None}


@asynccontextmanager
async def _registry(settings: Settings) -> AsyncIterator[TenantRegistry]:
    async with opened_storage(settings, "the tenants") as storage, _registry_of(storage, settings) as registry:
        yield registry


@asynccontextmanager
async def _registry_of(storage: Storage, settings: Settings) -> AsyncIterator[TenantRegistry]:
    policy = policy_or_exit(settings.policy)
    feed = RecordFeed(storage)
    registry = TenantRegistry(feed, TenantDirectory(feed), lambda: policy)
    await registry.refresh()
    yield registry


def _show(tenant: dict[str, Any], done: str, *, as_json: bool) -> None:
    if as_json:
        print_json(tenant)
    else:
        print_line(f"tenant {tenant['name']} {done}")
