"""`warmpath keys`: manages API keys in the storage, and hashes keys for policy files."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import typer
import yaml
from pydantic import ValidationError

from gateway.auth.keyring import (
    OVERLAP_SECONDS,
    Keyring,
    is_rotation_due,
    must_fit,
    public_form,
    rfc3339_seconds,
    state_of,
)
from gateway.auth.records import RecordFeed
from gateway.auth.tenant_directory import TENANT
from gateway.cli.common import (
    MISUSE,
    PROBLEM,
    AsJson,
    fail,
    policy_or_exit,
    print_json,
    print_line,
    print_stderr,
    print_table,
    settings_or_exit,
    usage_error,
    verb_app,
    warn,
)
from gateway.cli.stored import StorageOption, audited, opened_storage, run_or_exit
from gateway.cli.times import parse_expiry
from gateway.core import api_keys as keys
from gateway.core.errors import BadRequest
from gateway.policy import Limits, Policy
from gateway.policy.fields import parse_duration
from gateway.policy.file import findings
from gateway.settings import Settings
from gateway.storage.base import KeyRecord, Storage

STRONG_SECRET_CHARACTERS = 22  # 128 bits if they are random

app = verb_app(help="Create, list, rotate and revoke API keys.")

KeyId = Annotated[str, typer.Argument(metavar="ID", help="Public part of the key wp-<id>-<secret>.")]


def _seconds(text: str | None) -> float | None:
    with usage_error():
        return None if text is None else float(parse_duration(text))


def _limits(text: str | None) -> Limits | None:
    """Parse limits, YAML as in a policy."""
    try:
        return None if text is None else Limits.model_validate(yaml.safe_load(text))
    except ValidationError as error:
        found = [(".".join(["limits", *map(str, path)]), message) for path, message in findings(error, Limits)]
        raise typer.BadParameter("; ".join(": ".join(each) for each in found)) from None
    except yaml.YAMLError as error:
        raise typer.BadParameter(f"limits must be YAML as in a policy: {error}") from None


@app.command()
def create(
    tenant: Annotated[str, typer.Option(metavar="TENANT", help="Tenant of the key, of the policy or the storage.")],
    key_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Public part of the key: a-z, 0-9 and _. Default: random.")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="End of its validity, as in 30d or 2026-12-01. Default: never.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="Model that the key may use. Repeatable. Default: all of the tenant's."),
    ] = None,
    latency_class: Annotated[
        list[str] | None,
        typer.Option("--class", metavar="CLASS", help="Latency class that the key may use. Repeatable. Default: all."),
    ] = None,
    limits: Annotated[
        str | None,
        typer.Option(metavar="YAML", help="Limits of the key, as in '{requests: 60/1m, budget: {amount: 5}}'."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Create the key even if its tenant, models or classes do not exist yet.")
    ] = False,
    storage: StorageOption = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it. It is not shown again: only its hash is stored.

    The tenant must be in the policy (WARMPATH_POLICY, or the default policy) or in the storage, and the models and
    classes in the policy. With --force they need not be: the key works once they are there.
    """
    with usage_error():
        life_seconds = None if expires is None else parse_expiry(expires)
    own_limits = _limits(limits)
    settings = settings_or_exit(storage=storage)
    policy = None if force else policy_or_exit(settings.policy)

    async def create_key() -> tuple[str, KeyRecord]:
        details = {"models": model, "classes": latency_class, "expires": expires, "limits": limits}
        async with opened_storage(settings, "the keys") as storage:
            if policy is not None:
                await _check_names(storage, policy, settings, tenant, model, latency_class, own_limits)
        async with (
            _keyring(settings) as keyring,
            audited(settings, "keys create", target=tenant, details={"id": key_id, **details}),
        ):
            return await keyring.create(
                tenant, key_id=key_id, life_seconds=life_seconds, models=model, classes=latency_class, limits=own_limits
            )

    _show_once(*run_or_exit(create_key()), as_json=as_json)


async def _check_names(
    storage: Storage,
    policy: Policy,
    settings: Settings,
    tenant: str,
    models: list[str] | None,
    classes: list[str] | None,
    limits: Limits | None,
) -> None:
    """Exits if neither the policy nor the storage has one of these names."""
    feed = RecordFeed(storage)
    await feed.refresh()
    try:
        must_fit(policy, tenant, models, classes, limits, stored_tenants=feed.of_kind(TENANT))
    except BadRequest as error:
        fail(
            f"{error.message} ({settings.policy}). Set WARMPATH_POLICY to the gateway's policy, or use --force",
            code=MISUSE,
        )


@app.command()
def rotate(
    key_id: KeyId,
    overlap: Annotated[
        str, typer.Option(metavar="TIME", help="How long the old secret stays valid, as in 1h. At most 30 days.")
    ] = f"{OVERLAP_SECONDS / 3600:g}h",
    storage: StorageOption = None,
    as_json: AsJson = False,
) -> None:
    """Give a key a new secret and print it. It is not shown again. The old secret stays valid for a while."""
    seconds = _seconds(overlap)
    assert seconds is not None
    settings = settings_or_exit(storage=storage)

    async def change() -> tuple[str, KeyRecord]:
        async with (
            _keyring(settings) as keyring,
            audited(settings, "keys rotate", target=key_id, details={"overlap": overlap}),
        ):
            return await keyring.rotate(key_id, overlap_seconds=seconds)

    _show_once(*run_or_exit(change()), as_json=as_json)


@app.command("list")
def list_keys(
    rotation_due: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Only active keys with a secret above this age, as in 90d. If any, exit 1."),
    ] = None,
    storage: StorageOption = None,
    as_json: AsJson = False,
) -> None:
    """List the keys in the storage, including revoked ones."""
    settings = settings_or_exit(storage=storage)

    async def read() -> list[KeyRecord]:
        async with _keyring(settings) as keyring:
            return await keyring.all()

    records = run_or_exit(read())
    if rotation_due is not None:
        before = rfc3339_seconds(time.time() - (_seconds(rotation_due) or 0.0))
        records = [record for record in records if is_rotation_due(record, before)]
    if as_json:
        print_json([public_form(record) for record in records])
    else:
        print_table(("ID", "TENANT", "STATE", "CREATED", "EXPIRES", "MODELS"), [_row(record) for record in records])
    if rotation_due is not None and records:
        raise typer.Exit(PROBLEM)


@app.command()
def revoke(
    key_id: KeyId,
    storage: StorageOption = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a key permanently. It stays in the list."""
    settings = settings_or_exit(storage=storage)

    async def revoke_key() -> KeyRecord:
        async with _keyring(settings) as keyring, audited(settings, "keys revoke", target=key_id):
            return await keyring.revoke(key_id)

    record = run_or_exit(revoke_key())
    if as_json:
        print_json(public_form(record))
    else:
        print_line(f"key {key_id} of {record.tenant} revoked")


@app.command("change-pepper")
def change_pepper(storage: StorageOption = None) -> None:
    """Change the pepper of the storage. The new pepper is the WARMPATH_KEY_PEPPER of this command.

    Keys in the storage that were made with the old pepper become invalid until they are rotated. Set the new pepper for
    all gateways and restart them. Also renew the hashes in policy files.
    """
    settings = settings_or_exit(storage=storage)

    async def change() -> tuple[bool, list[str]]:
        async with _keyring(settings) as keyring, audited(settings, "keys change-pepper"):
            changed = await keyring.change_pepper()
            return changed, [record.id for record in await keyring.all() if state_of(record) == "active"]

    changed, active = run_or_exit(change())
    if not changed:
        print_line("The storage has this WARMPATH_KEY_PEPPER already.")
        return
    print_line("Pepper changed. Restart all gateways with this WARMPATH_KEY_PEPPER.")
    if active:
        print_line("Rotate these keys, which were made with the old pepper: " + ", ".join(active))


@app.command("hash")
def hash_key(
    new: Annotated[
        str | None, typer.Option("--new", metavar="ID", help="Create a key with this id, and print it first.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the line for a key in a policy file. It belongs under `keys:` of the key's tenant.

    Reads the key from stdin, or prompts for it. The hash is valid for the current WARMPATH_KEY_PEPPER only.
    """
    pepper = settings_or_exit().key_pepper.get_secret_value()
    try:
        key = _read_key() if new is None else keys.new_key(new)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--new") from None
    parsed = keys.parse_key(key)
    if parsed is None:
        fail("not a key: a key has the form wp-<id>-<secret>, with an id of a-z, 0-9 and _", code=MISUSE)
    key_id, secret = parsed
    if len(secret) < STRONG_SECRET_CHARACTERS:
        warn("this secret is so short that it can be guessed; `warmpath keys hash --new ID` creates a strong key")
    line = {"id": key_id, "hash": keys.hash_key(key, pepper)}
    if as_json:
        print_json(line if new is None else {"key": key, **line})
        return
    if new is not None:
        print_line(key)
    print_line(f'- {{id: {key_id}, hash: "{line["hash"]}"}}')


def _read_key() -> str:
    if sys.stdin.isatty():
        return str(typer.prompt("Key", hide_input=True, err=True)).strip()
    return sys.stdin.readline().strip()


def _show_once(key: str, record: KeyRecord, *, as_json: bool) -> None:
    if as_json:
        print_json({"key": key, **public_form(record)})
    else:
        print_line(key)
        print_stderr("This key will not be shown again.", style="dim")


@asynccontextmanager
async def _keyring(settings: Settings) -> AsyncIterator[Keyring]:
    async with opened_storage(settings, "the keys") as storage:
        yield Keyring(storage, settings.key_pepper.get_secret_value())


def _row(record: KeyRecord) -> tuple[str, ...]:
    models = "all" if record.models is None else ", ".join(record.models)
    return record.id, record.tenant, state_of(record), record.created, record.expires or "never", models
