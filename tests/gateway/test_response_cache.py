from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.core.errors import StorageUnavailable, UpstreamCut
from gateway.response_cache import Answer, LeaderFailed, Recording, ResponseCache, Unrecorded, cache_key
from gateway.storage import open_storage
from gateway.storage.base import BlobCache
from tests.gateway.calls import a_call, a_policy, chat


def certain(**fields: Any) -> dict[str, Any]:
    return chat(temperature=0, **fields)


class Away:
    """A storage that cannot be reached."""

    async def get(self, key: str) -> bytes | None:
        raise StorageUnavailable("away")

    async def put(self, key: str, value: bytes, *, ttl_seconds: float) -> None:
        raise StorageUnavailable("away")


async def read(answer: Answer | Recording | Unrecorded) -> list[bytes]:
    assert isinstance(answer, Answer)
    chunks = [await answer.first()]

    def keep(chunk: bytes) -> bool:
        chunks.append(chunk)
        return True

    assert await answer.stream_to(keep)
    return chunks


async def lead(cache: ResponseCache, body: dict[str, Any] | None = None) -> Recording:
    found = await cache.lookup(a_call(body or certain()))
    assert isinstance(found, Recording)
    return found


@pytest.fixture
async def cache() -> ResponseCache:
    storage = open_storage("memory://")
    await storage.open()
    return ResponseCache(storage)


async def test_a_finished_answer_is_replayed_chunk_by_chunk(cache: ResponseCache) -> None:
    recording = await lead(cache)
    for chunk in (b"one", b"two"):
        recording.write(chunk)
    await recording.finish()
    again = await cache.lookup(a_call(certain()))
    assert isinstance(again, Answer) and again.kind == "hit"
    assert await read(again) == [b"one", b"two"]


async def test_equal_calls_in_flight_share_one_recording(cache: ResponseCache) -> None:
    recording = await lead(cache)
    recording.write(b"one")
    follower = await cache.lookup(a_call(certain()))
    assert isinstance(follower, Answer) and follower.kind == "shared"
    reading = asyncio.create_task(read(follower))
    await asyncio.sleep(0)
    assert recording.followed
    recording.write(b"two")
    await recording.finish()
    assert await reading == [b"one", b"two"]
    assert not recording.followed


async def test_a_leader_that_fails_at_once_leaves_its_followers_to_themselves(cache: ResponseCache) -> None:
    recording = await lead(cache)
    reading = asyncio.create_task(read(await cache.lookup(a_call(certain()))))
    await asyncio.sleep(0)
    recording.fail(UpstreamCut("gone"))
    with pytest.raises(LeaderFailed):
        await reading
    assert isinstance(await cache.lookup(a_call(certain())), Recording)  # no call follows a failed recording


async def test_a_leader_that_fails_midway_tells_its_followers(cache: ResponseCache) -> None:
    recording = await lead(cache)
    recording.write(b"one")
    reading = asyncio.create_task(read(await cache.lookup(a_call(certain()))))
    await asyncio.sleep(0)
    recording.fail(UpstreamCut("gone"))
    with pytest.raises(UpstreamCut):
        await reading


async def test_the_leader_learns_when_its_last_follower_has_left(cache: ResponseCache) -> None:
    recording = await lead(cache)
    abandoned: list[bool] = []
    recording.when_abandoned(lambda: abandoned.append(True))
    readers = [asyncio.create_task(read(await cache.lookup(a_call(certain())))) for _ in range(2)]
    await asyncio.sleep(0)
    readers[0].cancel()
    await asyncio.gather(readers[0], return_exceptions=True)
    assert not abandoned
    readers[1].cancel()
    await asyncio.gather(readers[1], return_exceptions=True)
    assert abandoned


async def test_a_long_answer_is_not_kept() -> None:
    storage = open_storage("memory://")
    await storage.open()
    cache = ResponseCache(storage)
    policy = a_policy(cache={"max_answer_bytes": 10})
    recording = await cache.lookup(a_call(certain(), policy))
    assert isinstance(recording, Recording)
    recording.write(b"x" * 11)
    assert recording.chunks == []
    await recording.finish()
    assert isinstance(await cache.lookup(a_call(certain(), policy)), Recording)


async def test_a_store_that_is_away_costs_the_cache_and_nothing_else() -> None:
    away: BlobCache = Away()
    cache = ResponseCache(away)
    recording = await cache.lookup(a_call(certain()))
    assert isinstance(recording, Recording)
    recording.write(b"one")
    await recording.finish()


async def test_a_leader_that_leaves_while_the_store_is_asked_leaves_nobody_waiting() -> None:
    class Slow(Away):
        async def get(self, key: str) -> bytes | None:
            await asyncio.Event().wait()
            return None

    cache = ResponseCache(Slow())
    leader = asyncio.create_task(cache.lookup(a_call(certain())))
    await asyncio.sleep(0)
    follower = asyncio.create_task(read(await cache.lookup(a_call(certain()))))
    await asyncio.sleep(0)
    leader.cancel()
    with pytest.raises(LeaderFailed):
        await asyncio.wait_for(follower, 10)
    assert cache.in_flight == 0


async def test_what_was_never_put_into_the_store_is_no_answer() -> None:
    class Noisy(Away):
        async def get(self, key: str) -> bytes | None:
            return b"\xc1"

    assert isinstance(await ResponseCache(Noisy()).lookup(a_call(certain())), Recording)


async def test_nobody_follows_a_call_of_another_class(cache: ResponseCache) -> None:
    policy = a_policy(rules=[{"match": {"service_tier": "flex"}, "class": "batch"}])
    leader = await cache.lookup(a_call(certain(service_tier="flex"), policy))
    assert isinstance(leader, Recording)
    assert isinstance(await cache.lookup(a_call(certain(), policy)), Recording)
    leader.write(b"one")
    await leader.finish()
    assert isinstance(await cache.lookup(a_call(certain(seed=1, service_tier="flex"), policy)), Recording)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (certain(), certain(max_tokens=5)),
        (certain(), certain(stream=True)),
        (certain(), chat("other", temperature=0)),
        (certain(), certain(seed=1)),
        (certain(), certain(x_unknown=1)),
        (certain(stream=True), certain(stream=True, stream_options={"include_obfuscation": False})),
    ],
)
def test_whatever_can_change_the_answer_is_in_the_key(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert cache_key(a_call(one)) != cache_key(a_call(other))


def test_what_can_not_change_the_answer_is_not_in_the_key() -> None:
    same = [
        certain(),
        certain(user="someone", metadata={"a": "b"}, service_tier="auto"),
        certain() | {"model": "alias"},
        certain(stream=False),
    ]
    options: list[dict[str, Any] | None] = [None, {}, {"include_usage": True}]
    same_streams = [certain(stream=True), *(certain(stream=True, stream_options=given) for given in options)]
    assert len({cache_key(a_call(body)) for body in same_streams}) == 1
    assert len({cache_key(a_call(body)) for body in same}) == 1


def test_a_model_that_is_served_by_another_one_now_has_other_answers() -> None:
    changed = a_policy(
        deployments=[{"name": name, "base_url": "http://a.invalid/v1", "model": "newer"} for name in ("a", "b")]
    )
    assert cache_key(a_call(certain())) != cache_key(a_call(certain(), changed))


def test_tenants_share_nothing_and_keys_only_what_the_policy_says() -> None:
    by_key = a_policy(cache={"scope": "key"})
    assert cache_key(a_call(certain())) != cache_key(a_call(certain(), tenant="u"))
    assert cache_key(a_call(certain())) == cache_key(a_call(certain(), key="k2"))
    assert cache_key(a_call(certain(), by_key)) != cache_key(a_call(certain(), by_key, key="k2"))


def test_only_what_is_certain_is_cached_unless_the_policy_says_so() -> None:
    assert cache_key(a_call(chat())) is None
    assert cache_key(a_call(chat(seed=3))) is not None
    assert cache_key(a_call(chat(), a_policy(cache={"when": "always"}))) is not None
    assert cache_key(a_call(certain(), a_policy(cache={"scope": "off"}))) is None
