"""`warmpath keys`: API keys in the storage, and the lines for those in a policy file."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from gateway import keys
from gateway.cli.common import (
    MISUSE,
    AsJson,
    complain,
    fail,
    policy_or_exit,
    say,
    say_json,
    say_table,
    settings_or_exit,
    verb_app,
    warn,
)
from gateway.errors import StorageUnavailable
from gateway.policy import choices
from gateway.policy.fields import parse_duration
from gateway.settings import Settings
from gateway.storage import open_storage
from gateway.storage.base import KeyRecord, Keys

STRONG_SECRET_CHARACTERS = 22  # 128 bits, if they are random

T = TypeVar("T")

app = verb_app(help="Make, list and revoke API keys.")

StorageOption = Annotated[
    str | None,
    typer.Option("--storage", metavar="URL", help="Where keys are kept; left out: WARMPATH_STORAGE."),
]


def _expiry(text: str | None) -> timedelta | None:
    try:
        return None if text is None else timedelta(seconds=parse_duration(text))
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def create(
    tenant: Annotated[str, typer.Option(help="Whose key it is: a tenant of the policy.")],
    key_id: Annotated[
        str | None, typer.Option("--id", help="Its public part: a-z, 0-9 and _; left out: a random one.")
    ] = None,
    expires: Annotated[str | None, typer.Option(help="How long it is valid, as in 30d; left out: for ever.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that it may use; may be repeated; left out: all of the tenant's.")
    ] = None,
    storage: StorageOption = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, this once: only its hash is kept.

    Where WARMPATH_POLICY is set, the tenant and the models must be in that policy.
    """
    valid_for = _expiry(expires)
    settings = settings_or_exit(storage=storage)
    _must_be_in_policy(settings, tenant, model or [])
    now = datetime.now(UTC)
    key_id = key_id or keys.new_id()
    try:
        key = keys.new_key(key_id)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--id") from None
    record = KeyRecord(
        id=key_id,
        tenant=tenant,
        hash=keys.hash_key(key, settings.key_pepper.get_secret_value()),
        created=_rfc3339(now),
        expires=_rfc3339(now + valid_for) if valid_for else None,
        models=tuple(model) if model else None,
    )
    _run(_add(settings, record))
    if as_json:
        say_json({"key": key, **_public(record)})
    else:
        say(key)
        complain("This key is not shown again.", style="dim")


@app.command("list")
def list_keys(storage: StorageOption = None, as_json: AsJson = False) -> None:
    """List the keys in the storage, revoked ones too."""
    records = _run(_list(settings_or_exit(storage=storage)))
    if as_json:
        say_json([_public(record) for record in records])
        return
    say_table(("ID", "TENANT", "STATE", "CREATED", "EXPIRES", "MODELS"), [_row(record) for record in records])


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The public part of the key wp-<id>-<secret>.")],
    storage: StorageOption = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a key for good. It stays in the list."""
    record = _run(_revoke(settings_or_exit(storage=storage), key_id))
    if as_json:
        say_json(_public(record))
    else:
        say(f"The key {key_id} of {record.tenant} is revoked.")


@app.command("hash")
def hash_key(
    new: Annotated[
        str | None, typer.Option("--new", metavar="ID", help="Make a new key of this id, and print it first.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the line that lets a key stand in a policy file, under `keys:` of its tenant.

    The key is read from stdin, or asked for. The hash holds for this WARMPATH_KEY_PEPPER alone.
    """
    pepper = settings_or_exit().key_pepper.get_secret_value()
    try:
        key = _read_key() if new is None else keys.new_key(new)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--new") from None
    parsed = keys.parse_key(key)
    if parsed is None:
        fail("that is no key: a key has the form wp-<id>-<secret>, with an id of a-z, 0-9 and _", code=MISUSE)
    key_id, secret = parsed
    if len(secret) < STRONG_SECRET_CHARACTERS:
        warn("this secret is short enough to be guessed; `warmpath keys hash --new ID` makes a strong key")
    line = {"id": key_id, "hash": keys.hash_key(key, pepper)}
    if as_json:
        say_json(line if new is None else {"key": key, **line})
        return
    if new is not None:
        say(key)
    say(f'- {{id: {key_id}, hash: "{line["hash"]}"}}')


def _read_key() -> str:
    if sys.stdin.isatty():
        return str(typer.prompt("Key", hide_input=True, err=True)).strip()
    return sys.stdin.readline().strip()


def _must_be_in_policy(settings: Settings, tenant: str, models: list[str]) -> None:
    """Only where a policy was named: the default one is not what a key for somewhere else is about."""
    if "policy" not in settings.model_fields_set:
        return
    policy = policy_or_exit(settings.policy)
    for what, names, known in (
        ("tenant", [tenant], policy.tenants_by_name),
        ("model", models, policy.models_by_name),
    ):
        for name in names:
            if name not in known:
                fail(f"there is no {what} {name!r} in {settings.policy}; {choices(name, list(known))}")


async def _add(settings: Settings, record: KeyRecord) -> None:
    async with _key_store(settings) as store:
        if await store.get_key(record.id) is not None:
            fail(f"there is a key {record.id!r} already; revoked ones keep their ids")
        await store.put_key(record)


async def _list(settings: Settings) -> list[KeyRecord]:
    async with _key_store(settings) as store:
        return await store.list_keys()


async def _revoke(settings: Settings, key_id: str) -> KeyRecord:
    async with _key_store(settings) as store:
        record = await store.get_key(key_id)
        if record is None:
            known = [r.id for r in await store.list_keys()]
            fail(f"there is no key {key_id!r} in the storage; {choices(key_id, known)}")
        revoked = msgspec.structs.replace(record, revoked=True)
        await store.put_key(revoked)
        return revoked


@asynccontextmanager
async def _key_store(settings: Settings) -> AsyncIterator[Keys]:
    if settings.storage.startswith("memory:"):
        fail(
            "memory:// keeps no keys beyond this command: give --storage or WARMPATH_STORAGE, "
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


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except StorageUnavailable as error:
        fail(error.message)


def _rfc3339(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def _state(record: KeyRecord) -> str:
    if record.revoked:
        return "revoked"
    expired = record.expires is not None and datetime.fromisoformat(record.expires) <= datetime.now(UTC)
    return "expired" if expired else "active"


def _row(record: KeyRecord) -> tuple[str, ...]:
    models = "all" if record.models is None else ", ".join(record.models)
    return record.id, record.tenant, _state(record), record.created, record.expires or "never", models


def _public(record: KeyRecord) -> dict[str, Any]:
    """Without the hash, which nobody needs to see."""
    return {
        "id": record.id,
        "tenant": record.tenant,
        "state": _state(record),
        "created": record.created,
        "expires": record.expires,
        "models": record.models,
    }
