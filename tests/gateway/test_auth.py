from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from gateway import auth
from gateway.auth import Authenticator
from gateway.errors import StorageUnavailable, Unauthenticated
from gateway.keys import hash_key, new_key
from gateway.policy import Policy
from gateway.storage.base import KeyRecord
from gateway.storage.memory import MemoryStorage
from tests.gateway.calls import a_policy

PEPPER = "pepper"
KEY = new_key("in_policy")
STORED = new_key("in_store")
RECORD = KeyRecord("in_store", "t", hash_key(STORED, PEPPER), "2026-01-01T00:00:00Z")


def policy() -> Policy:
    known = {"id": "in_policy", "hash": hash_key(KEY, PEPPER), "models": ["m"]}
    return a_policy(tenants=[{"name": "t", "keys": [known]}, {"name": "u"}])


class CountingKeys(MemoryStorage):
    asked = 0

    async def get_key(self, key_id: str) -> KeyRecord | None:
        self.asked += 1
        return await super().get_key(key_id)


@pytest.fixture
async def keys() -> CountingKeys:
    storage = CountingKeys()
    await storage.put_key(RECORD)
    return storage


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key.encode()}


async def refusal_of(authenticator: Authenticator, headers: dict[bytes, bytes]) -> str:
    with pytest.raises(Unauthenticated) as refusal:
        await authenticator.authenticate(headers, policy())
    return refusal.value.message


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEY),
        {b"authorization": b"bearer   " + KEY.encode()},
        {b"x-api-key": KEY.encode()},
        {b"authorization": b"Basic abc", b"x-api-key": KEY.encode()},
    ],
)
async def test_a_key_of_the_policy(keys: CountingKeys, headers: dict[bytes, bytes]) -> None:
    principal = await Authenticator(keys, PEPPER).authenticate(headers, policy())
    assert (principal.tenant.name, principal.key_id, principal.models) == ("t", "in_policy", frozenset({"m"}))
    assert keys.asked == 0


async def test_a_key_of_the_store_is_asked_for_once_a_while(keys: CountingKeys) -> None:
    authenticator = Authenticator(keys, PEPPER)
    for _ in range(3):
        principal = await authenticator.authenticate(bearer(STORED), policy())
    assert (principal.tenant.name, principal.key_id, principal.models) == ("t", "in_store", None)
    assert keys.asked == 1


async def test_all_wrong_keys_are_refused_in_the_same_words(keys: CountingKeys) -> None:
    authenticator = Authenticator(keys, PEPPER)
    wrong = [KEY + "0", new_key("in_policy"), new_key("in_store"), new_key("nobody"), "sk-other", "wp--", "é" * 300]
    assert {await refusal_of(authenticator, bearer(key)) for key in wrong} == {"the API key is not valid"}


@pytest.mark.parametrize(
    "headers", [{}, {b"authorization": b"Bearer "}, {b"authorization": b"Bearer"}, {b"x-api-key": b" "}]
)
async def test_without_a_key_it_is_said_how_to_send_one(keys: CountingKeys, headers: dict[bytes, bytes]) -> None:
    assert "Authorization: Bearer" in await refusal_of(Authenticator(keys, PEPPER), headers)


@pytest.mark.parametrize(
    "change",
    [
        {"revoked": True},
        {"expires": "2020-01-01T00:00:00+00:00"},
        {"expires": "2020-01-01T00:00:00Z"},
        {"tenant": "gone"},
    ],
)
async def test_a_record_that_is_valid_no_more(keys: CountingKeys, change: dict[str, Any]) -> None:
    await keys.put_key(msgspec.structs.replace(RECORD, **change))
    assert await refusal_of(Authenticator(keys, PEPPER), bearer(STORED)) == "the API key is not valid"


async def test_one_that_expires_later_is_valid_now(keys: CountingKeys) -> None:
    await keys.put_key(msgspec.structs.replace(RECORD, expires="2999-01-01T00:00:00Z"))
    assert (await Authenticator(keys, PEPPER).authenticate(bearer(STORED), policy())).key_id == "in_store"


async def test_another_pepper_voids_every_key(keys: CountingKeys) -> None:
    for key in (KEY, STORED):
        await refusal_of(Authenticator(keys, "another"), bearer(key))


async def test_a_revocation_takes_effect_soon(keys: CountingKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    authenticator = Authenticator(keys, PEPPER)
    await authenticator.authenticate(bearer(STORED), policy())
    await keys.put_key(msgspec.structs.replace(RECORD, revoked=True))
    now += auth.REMEMBER_SECONDS
    await refusal_of(authenticator, bearer(STORED))


async def test_guessing_ids_fills_no_memory(keys: CountingKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "REMEMBERED_KEYS_MAX", 5)
    authenticator = Authenticator(keys, PEPPER)
    for number in range(20):
        await refusal_of(authenticator, bearer(new_key(f"guess{number}")))
    assert len(authenticator._remembered) == 5


async def test_a_store_that_is_away_is_told_as_such() -> None:
    class Away(MemoryStorage):
        async def get_key(self, key_id: str) -> KeyRecord | None:
            raise StorageUnavailable("away")

    authenticator = Authenticator(Away(), PEPPER)
    with pytest.raises(StorageUnavailable):
        await authenticator.authenticate(bearer(STORED), policy())
    assert (await authenticator.authenticate(bearer(KEY), policy())).key_id == "in_policy"  # needs no store


async def test_many_calls_at_once_with_one_unknown_key(keys: CountingKeys) -> None:
    authenticator = Authenticator(keys, PEPPER)
    headers = bearer(new_key("nobody"))
    answers = await asyncio.gather(
        *(authenticator.authenticate(headers, policy()) for _ in range(20)), return_exceptions=True
    )
    assert all(isinstance(answer, Unauthenticated) for answer in answers)
