"""`warmpath keys`: API keys in the storage, and the lines for those in a policy file."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar

import typer
import yaml
from pydantic import ValidationError

from gateway.auth.keyring import OVERLAP_SECONDS, Keyring, must_fit, public_form, state_of
from gateway.cli.common import (
    MISUSE,
    PROBLEM,
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
    well_formed,
)
from gateway.core import api_keys as keys
from gateway.core.errors import BadRequest, GatewayError, StorageUnavailable
from gateway.policy import Limits
from gateway.policy.fields import parse_duration
from gateway.policy.file import findings
from gateway.settings import Settings
from gateway.storage import open_storage
from gateway.storage.base import KeyRecord

STRONG_SECRET_CHARACTERS = 22  # 128 bits, if they are random

T = TypeVar("T")

app = verb_app(help="Make, list, rotate and revoke API keys.")

KeyId = Annotated[str, typer.Argument(metavar="ID", help="The public part of the key wp-<id>-<secret>.")]
StorageOption = Annotated[
    str | None,
    typer.Option("--storage", metavar="URL", help="Where keys are kept; left out: WARMPATH_STORAGE."),
]


def _seconds(text: str | None) -> float | None:
    with well_formed():
        return None if text is None else float(parse_duration(text))


def _limits(text: str | None) -> Limits | None:
    """In YAML, as a policy has them."""
    try:
        return None if text is None else Limits.model_validate(yaml.safe_load(text))
    except ValidationError as error:
        found = [(".".join(["limits", *map(str, path)]), message) for path, message in findings(error, Limits)]
        raise typer.BadParameter("; ".join(": ".join(each) for each in found)) from None
    except yaml.YAMLError as error:
        raise typer.BadParameter(f"limits are written as in a policy: {error}") from None


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
    latency_class: Annotated[
        list[str] | None, typer.Option("--class", help="A latency class that it may use; may be repeated.")
    ] = None,
    limits: Annotated[
        str | None, typer.Option(metavar="YAML", help="Limits of its own: '{requests: 60/1m, budget: {amount: 5}}'.")
    ] = None,
    storage: StorageOption = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, this once: only its hash is kept.

    Where WARMPATH_POLICY is set, the tenant, the models and the classes must be in that policy.
    """
    life_seconds, own_limits = _seconds(expires), _limits(limits)
    settings = settings_or_exit(storage=storage)
    if "policy" in settings.model_fields_set:  # the default one is not what a key for somewhere else is about
        _or_exit(lambda: must_fit(policy_or_exit(settings.policy), tenant, model, latency_class, own_limits))

    async def make() -> tuple[str, KeyRecord]:
        async with _keyring(settings) as keyring:
            return await keyring.create(
                tenant, key_id=key_id, life_seconds=life_seconds, models=model, classes=latency_class, limits=own_limits
            )

    _show_once(*_run(make()), as_json=as_json)


@app.command()
def rotate(
    key_id: KeyId,
    overlap: Annotated[
        str, typer.Option(help="How long the secret until now stays good, as in 1h; 30 days at most.")
    ] = f"{OVERLAP_SECONDS / 3600:g}h",
    storage: StorageOption = None,
    as_json: AsJson = False,
) -> None:
    """Give a key a new secret and print it, this once. The secret until now stays good for a while."""
    seconds = _seconds(overlap)
    assert seconds is not None
    settings = settings_or_exit(storage=storage)

    async def change() -> tuple[str, KeyRecord]:
        async with _keyring(settings) as keyring:
            return await keyring.rotate(key_id, overlap_seconds=seconds)

    _show_once(*_run(change()), as_json=as_json)


@app.command("list")
def list_keys(storage: StorageOption = None, as_json: AsJson = False) -> None:
    """List the keys in the storage, revoked ones too."""
    settings = settings_or_exit(storage=storage)

    async def look() -> list[KeyRecord]:
        async with _keyring(settings) as keyring:
            return await keyring.all()

    records = _run(look())
    if as_json:
        say_json([public_form(record) for record in records])
        return
    say_table(("ID", "TENANT", "STATE", "CREATED", "EXPIRES", "MODELS"), [_row(record) for record in records])


@app.command()
def revoke(
    key_id: KeyId,
    storage: StorageOption = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a key for good. It stays in the list."""
    settings = settings_or_exit(storage=storage)

    async def end() -> KeyRecord:
        async with _keyring(settings) as keyring:
            return await keyring.revoke(key_id)

    record = _run(end())
    if as_json:
        say_json(public_form(record))
    else:
        say(f"The key {key_id} of {record.tenant} is revoked.")


@app.command("change-pepper")
def change_pepper(storage: StorageOption = None) -> None:
    """Let keys be made with another WARMPATH_KEY_PEPPER from now on: the one that is set for this command.

    No key in the storage that was made with the one before is valid then, until it is rotated. Set the new one for
    every gateway, and start them again. The hashes in policies are to be made anew, too.
    """
    settings = settings_or_exit(storage=storage)

    async def change() -> tuple[bool, list[str]]:
        async with _keyring(settings) as keyring:
            changed = await keyring.change_pepper()
            return changed, [record.id for record in await keyring.all() if state_of(record) == "active"]

    changed, active = _run(change())
    if not changed:
        say("This WARMPATH_KEY_PEPPER is the storage's already.")
        return
    say("From now on keys are made with this WARMPATH_KEY_PEPPER. Start the gateways with it, too.")
    if active:
        say("To be rotated, since they were made with another one: " + ", ".join(active))


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


def _show_once(key: str, record: KeyRecord, *, as_json: bool) -> None:
    if as_json:
        say_json({"key": key, **public_form(record)})
    else:
        say(key)
        complain("This key is not shown again.", style="dim")


@asynccontextmanager
async def _keyring(settings: Settings) -> AsyncIterator[Keyring]:
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
        yield Keyring(storage, settings.key_pepper.get_secret_value())
    finally:
        await storage.close()


def _run(work: Coroutine[Any, Any, T]) -> T:
    return _or_exit(lambda: asyncio.run(work))


def _or_exit(work: Callable[[], T]) -> T:
    try:
        return work()
    except StorageUnavailable as error:
        fail(error.message)
    except GatewayError as error:
        # A value that was given is wrong in itself; or it is what the storage says.
        fail(error.message, code=MISUSE if type(error) is BadRequest else PROBLEM)


def _row(record: KeyRecord) -> tuple[str, ...]:
    models = "all" if record.models is None else ", ".join(record.models)
    return record.id, record.tenant, state_of(record), record.created, record.expires or "never", models
