from __future__ import annotations

import asyncio
import gc
import time
import types
from typing import Any

import msgspec
import pytest

from gateway.auth import authenticator as auth
from gateway.auth.authenticator import Authenticator
from gateway.core import api_keys
from gateway.core.api_keys import hash_key, new_key
from gateway.core.errors import StorageUnavailable, Unauthenticated
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


async def test_a_stored_key_is_the_same_principal_until_something_of_it_changes(
    keys: CountingKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    authenticator, policies = Authenticator(keys, PEPPER), policy()
    first = await authenticator.authenticate(bearer(STORED), policies)
    monkeypatch.setattr(auth, "REMEMBER_SECONDS", 0.0)
    assert await authenticator.authenticate(bearer(STORED), policies) is first
    assert await authenticator.principal_of("in_store", policies) is first
    for change in {"models": ("m",)}, {"classes": ("batch",)}, {"limits": {"concurrency": 1}}, {"tenant": "u"}:
        await keys.put_key(msgspec.structs.replace(RECORD, **change))
        assert await authenticator.authenticate(bearer(STORED), policies) != first, change
    await keys.put_key(RECORD)
    next_policy = policy()
    again = await authenticator.authenticate(bearer(STORED), next_policy)
    assert again.tenant is next_policy.tenants_by_name["t"]


async def test_a_policy_s_key_is_the_same_principal_with_and_without_its_secret(keys: CountingKeys) -> None:
    authenticator, policies = Authenticator(keys, PEPPER), policy()
    later = await authenticator.principal_of("in_policy", policies)
    assert await authenticator.authenticate(bearer(KEY), policies) == later
    assert await authenticator.principal_of("in_policy", policies) is await authenticator.authenticate(
        bearer(KEY), policies
    )


async def test_all_wrong_keys_are_refused_in_the_same_words(keys: CountingKeys) -> None:
    authenticator = Authenticator(keys, PEPPER)
    wrong = [KEY + "0", new_key("in_policy"), new_key("in_store"), new_key("nobody"), "sk-other", "wp--", "é" * 300]
    assert {await refusal_of(authenticator, bearer(key)) for key in wrong} == {"the API key is not valid"}


def reachable_texts(*roots: object) -> set[str | bytes]:
    """All strings and bytes that these objects keep alive, apart from those of classes, modules and functions."""
    found: set[str | bytes] = set()
    seen: set[int] = set()
    waiting = [*roots]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, (type, types.ModuleType, types.FunctionType)):
            continue
        seen.add(id(each))
        if isinstance(each, (str, bytes)):
            found.add(each)
        waiting += gc.get_referents(each)
    return found


async def test_what_was_presented_is_not_kept(keys: CountingKeys) -> None:
    authenticator, policies = Authenticator(keys, PEPPER), policy()
    wrong = [new_key("in_policy"), new_key("in_store"), new_key("nobody"), "sk-other", "x" * 60_000]
    for key in wrong:
        await refusal_of(authenticator, {b"authorization": b"Bearer " + key.encode()})
    for key in (KEY, STORED):
        await authenticator.authenticate({b"authorization": b"Bearer " + key.encode()}, policies)
    kept = reachable_texts(authenticator, vars(api_keys))
    assert PEPPER in kept  # the search finds what is there
    for key in (*wrong, KEY, STORED):
        assert key not in kept and key.encode() not in kept and key.rpartition("-")[2] not in kept


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


async def test_a_key_that_the_next_policy_does_not_have_is_known_no_more(keys: CountingKeys) -> None:
    authenticator, before = Authenticator(keys, PEPPER), policy()
    known = await authenticator.authenticate(bearer(KEY), before)
    assert await authenticator.authenticate(bearer(KEY), before) == known
    await refusal_of(authenticator, bearer(f"{KEY}0"))
    with pytest.raises(Unauthenticated):
        await authenticator.authenticate(bearer(KEY), a_policy(tenants=[{"name": "t"}]))


async def test_another_pepper_voids_every_key(keys: CountingKeys) -> None:
    for key in (KEY, STORED):
        await refusal_of(Authenticator(keys, "another"), bearer(key))


async def test_a_revocation_takes_effect_soon(keys: CountingKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    authenticator = Authenticator(keys, PEPPER)
    await authenticator.authenticate(bearer(STORED), policy())
    await keys.put_key(msgspec.structs.replace(RECORD, revoked=True))
    now += 1.0  # second, as is promised
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


async def test_a_rotated_key_opens_with_both_secrets_for_a_while(keys: CountingKeys) -> None:
    newer = new_key("in_store")
    for old_expires, old_opens in (("2999-01-01T00:00:00Z", True), ("2020-01-01T00:00:00Z", False)):
        rotated = {"hash": hash_key(newer, PEPPER), "old_hash": RECORD.hash, "old_expires": old_expires}
        await keys.put_key(msgspec.structs.replace(RECORD, **rotated))
        authenticator = Authenticator(keys, PEPPER)
        assert (await authenticator.authenticate(bearer(newer), policy())).key_id == "in_store"
        if old_opens:
            await authenticator.authenticate(bearer(STORED), policy())
        else:
            await refusal_of(authenticator, bearer(STORED))
    await keys.put_key(msgspec.structs.replace(RECORD, **rotated, revoked=True))
    for key in (newer, STORED):
        await refusal_of(Authenticator(keys, PEPPER), bearer(key))


async def test_a_key_brings_its_rights_and_limits(keys: CountingKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    limits = {"requests": {"amount": 5, "period": 60.0}}
    await keys.put_key(msgspec.structs.replace(RECORD, models=("m",), classes=("batch",), limits=limits))
    authenticator = Authenticator(keys, PEPPER)
    principal = await authenticator.authenticate(bearer(STORED), policy())
    assert (principal.models, principal.classes) == (frozenset({"m"}), frozenset({"batch"}))
    assert principal.limits is not None
    assert principal.limits.requests is not None
    assert principal.limits.requests.amount == 5
    now += auth.REMEMBER_SECONDS
    again = await authenticator.authenticate(bearer(STORED), policy())
    assert keys.asked == 2
    assert again.limits is principal.limits  # read again, the same: what was made of them still holds


async def test_a_key_that_was_presented_earlier_is_found_without_its_secret(keys: CountingKeys) -> None:
    authenticator = Authenticator(keys, PEPPER)
    for key_id in ("in_policy", "in_store"):
        principal = await authenticator.principal_of(key_id, policy())
        assert principal is not None
        assert (principal.tenant.name, principal.key_id) == ("t", key_id)
    assert await authenticator.principal_of("nobody", policy()) is None
    await keys.put_key(msgspec.structs.replace(RECORD, revoked=True))
    assert await Authenticator(keys, PEPPER).principal_of("in_store", policy()) is None


async def test_in_an_outage_known_keys_hold_for_a_while_where_the_policy_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    class Leaving(CountingKeys):
        async def get_key(self, key_id: str) -> KeyRecord | None:
            record = await super().get_key(key_id)
            if now > 100.0:
                raise StorageUnavailable("away")
            return record

    keys = Leaving()
    await keys.put_key(RECORD)
    authenticator = Authenticator(keys, PEPPER)
    goes_on = a_policy(tenants=[{"name": "t"}], storage_outage={"limits": "local_share"})
    await authenticator.authenticate(bearer(STORED), goes_on)
    now += auth.REMEMBER_SECONDS
    for _ in range(3):
        await authenticator.authenticate(bearer(STORED), goes_on)
    assert keys.asked == 2  # no request waits for a storage that has just failed
    with pytest.raises(StorageUnavailable):
        await authenticator.authenticate(bearer(new_key("other")), goes_on)
    with pytest.raises(StorageUnavailable):
        await authenticator.authenticate(bearer(STORED), a_policy(tenants=[{"name": "t"}]))
    now += auth.OUTAGE_SECONDS
    with pytest.raises(StorageUnavailable):
        await authenticator.authenticate(bearer(STORED), goes_on)


async def test_requests_with_the_same_key_share_one_read(keys: CountingKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = asyncio.Event()
    get_key = MemoryStorage.get_key

    async def slow(self: MemoryStorage, key_id: str) -> KeyRecord | None:
        await answer.wait()
        return await get_key(self, key_id)

    monkeypatch.setattr(MemoryStorage, "get_key", slow)
    authenticator, loaded = Authenticator(keys, PEPPER), policy()
    requests = [asyncio.create_task(authenticator.authenticate(bearer(STORED), loaded)) for _ in range(1000)]
    await asyncio.sleep(0)
    requests[0].cancel()  # the request that began the read
    await asyncio.sleep(0)
    answer.set()
    with pytest.raises(asyncio.CancelledError):
        await requests[0]
    principals = await asyncio.gather(*requests[1:])
    assert keys.asked == 1
    assert {id(principal) for principal in principals} == {id(principals[0])}


async def test_requests_that_share_a_read_share_its_failure(keys: CountingKeys) -> None:
    class Unreachable(CountingKeys):
        async def get_key(self, key_id: str) -> KeyRecord | None:
            self.asked += 1
            await asyncio.sleep(0)
            raise StorageUnavailable("no answer")

    unreachable = Unreachable()
    authenticator, loaded = Authenticator(unreachable, PEPPER), policy()
    requests = [authenticator.authenticate(bearer(STORED), loaded) for _ in range(10)]
    answers = await asyncio.gather(*requests, return_exceptions=True)
    assert [type(each) for each in answers] == [StorageUnavailable] * 10
    assert unreachable.asked == 1
