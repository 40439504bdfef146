"""The storage's check of the pepper, by memory and by two engines on one SQLite file or one redis-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.auth.authenticator import Authenticator
from gateway.auth.keyring import Keyring
from gateway.auth.pepper import CHECK_ID, PepperCheck
from gateway.core.errors import Conflict, NotFound, Unauthenticated
from gateway.storage.base import Storage
from gateway.storage.memory import MemoryStorage
from gateway.storage.redis import RedisStorage
from gateway.storage.sqlite import SqliteStorage
from tests.gateway.calls import a_policy
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Storage, Storage]]:
    """The same one, as two processes have it."""
    engines: tuple[Storage, Storage]
    if request.param == "memory":
        engines = (MemoryStorage(),) * 2
    elif request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'state.db'}"
        engines = (SqliteStorage(url, timeout_seconds=60.0), SqliteStorage(url, timeout_seconds=60.0))
    else:
        server: RedisServer = request.getfixturevalue("redis_server")
        with server.client() as client:
            client.flushall()
        engines = (RedisStorage(server.url, timeout_seconds=60.0), RedisStorage(server.url, timeout_seconds=60.0))
    for engine in engines:
        await engine.open()
    yield engines
    for engine in engines:
        await engine.close()


async def test_who_comes_first_sets_it_and_all_others_must_have_the_same(stores: tuple[Storage, Storage]) -> None:
    one, other = stores
    assert await PepperCheck(one, "theirs").agrees()
    assert await PepperCheck(other, "theirs").agrees()
    assert not await PepperCheck(other, "").agrees()
    assert not await PepperCheck(one, "theirs ").agrees()


async def test_of_two_who_come_first_at_once_one_is(stores: tuple[Storage, Storage]) -> None:
    checks = [PepperCheck(store, pepper) for store, pepper in zip(stores, ("a", "b"), strict=True)]
    agreed = await asyncio.gather(*[check.agrees() for check in checks])
    assert sorted(agreed) == [False, True]
    assert [await check.agrees() for check in checks] == agreed


async def test_no_key_is_made_or_rotated_that_would_never_be_valid(stores: tuple[Storage, Storage]) -> None:
    one, other = stores
    gateways = Keyring(one, "theirs")
    await gateways.create("t", key_id="ci")
    before = await one.get_key("ci")
    for change in (Keyring(other, "").create("t", key_id="new"), Keyring(other, "").rotate("ci")):
        with pytest.raises(Conflict, match="WARMPATH_KEY_PEPPER differs from the one"):
            await change
    assert await one.get_key("new") is None
    assert await one.get_key("ci") == before
    assert (await Keyring(other, "").revoke("ci")).revoked  # for which no pepper is needed


async def test_a_change_on_purpose(stores: tuple[Storage, Storage]) -> None:
    one, other = stores
    old, _ = await Keyring(one, "before").create("t", key_id="ci")
    keyring = Keyring(other, "now")
    assert await keyring.change_pepper()
    assert not await keyring.change_pepper()
    assert not await PepperCheck(one, "before").agrees()
    new, _ = await keyring.rotate("ci")
    policy, gateway = a_policy(tenants=[{"name": "t"}]), Authenticator(one, "now")
    assert (await gateway.authenticate({b"authorization": f"Bearer {new}".encode()}, policy)).key_id == "ci"
    with pytest.raises(Unauthenticated):
        await gateway.authenticate({b"authorization": f"Bearer {old}".encode()}, policy)


async def test_the_check_is_no_key_and_does_not_name_the_pepper(stores: tuple[Storage, Storage]) -> None:
    keyring = Keyring(stores[0], "hunter2")
    await keyring.create("t", key_id="ci")
    assert [record.id for record in await keyring.all()] == ["ci"]
    for ask in (keyring.get(CHECK_ID), keyring.rotate(CHECK_ID), keyring.revoke(CHECK_ID)):
        with pytest.raises(NotFound) as refused:
            await ask
        assert CHECK_ID not in refused.value.message.split(";")[1]
    kept = await stores[1].get_key(CHECK_ID)
    assert kept is not None and kept.tenant == "" and "hunter2" not in repr(kept)


async def test_the_same_pepper_looks_different_in_each_storage() -> None:
    hashes = set()
    for store in (MemoryStorage(), MemoryStorage()):
        assert await PepperCheck(store, "p").agrees()
        kept = await store.get_key(CHECK_ID)
        hashes.add(kept.hash if kept else "")
    assert len(hashes) == 2
