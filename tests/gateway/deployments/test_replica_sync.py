"""Replica sync: messages between gateways, without an event loop and through each shared storage."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from gateway.core.errors import StorageUnavailable
from gateway.deployments.fleet import Fleet
from gateway.deployments.replica_sync import (
    LOAD_REPEAT_SECONDS,
    MESSAGE_MAX_BLOCKS,
    OUTBOX_MAX_CALLS,
    SILENT_SECONDS,
    PeerReports,
    ReplicaSync,
    new_outbox,
)
from gateway.deployments.sent_call import SentCall
from gateway.policy import Policy
from gateway.prefix.in_flight import NO_PEER_LOAD, PeerLoad
from gateway.providers.offline import OfflineProvider
from gateway.routing.prefix_affinity import PrefixAffinity
from gateway.storage.base import PeerMessages, Storage
from gateway.storage.memory import MemoryStorage
from gateway.storage.redis import RedisStorage
from gateway.storage.sqlite import SqliteStorage
from gateway.types import Call
from tests.gateway.calls import a_call, a_policy, chat
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]

USAGE = ("req_1", 5000, 100, 7)


class PeerGateway:
    """A gateway with deployments a and b, and its peer reports."""

    def __init__(self, policy: Policy | None = None) -> None:
        outbox = new_outbox()
        self.fleet = Fleet(lambda deployment: OfflineProvider(), outbox=outbox)
        self.fleet.apply(policy or a_policy())
        self.a, self.b = self.fleet
        self.peers = PeerReports(self.fleet, outbox)

    def answers(self, call: Call, now: float = 0.0) -> SentCall:
        """At deployment b."""
        sent = self.b.send(call, now)
        sent.first_chunk(now)
        sent.end(now)
        sent.learn_usage(*USAGE)
        return sent

    def first_choice(self, call: Call) -> str:
        return PrefixAffinity().order(call, list(self.fleet), 0.0)[0].deployment.name


def long_call(start: str = "once ") -> Call:
    return a_call(chat(start * 4000))


def test_a_prompt_is_routed_to_where_a_peer_sent_it() -> None:
    one, other = PeerGateway(), PeerGateway()
    call = long_call()
    assert other.first_choice(call) == "a"
    one.answers(call)
    other.peers.receive(one.peers.make_message(0.0), 0.0)
    assert other.first_choice(call) == "b"
    assert other.peers.calls_received == 1
    assert other.b.token_calibration.tokens_per_block == one.b.token_calibration.tokens_per_block


def test_crashes_and_successes_of_requests_are_shared() -> None:
    """A request that was alone at one gateway is not blocked while its neighbour at the other one has not succeeded."""
    one, other = PeerGateway(), PeerGateway()
    for now in (0.0, 10.0):
        one.fleet.quarantine.crashed(7, one.a.shared_id, now)
        other.fleet.quarantine.crashed(8, other.a.shared_id, now)
        one.peers.receive(other.peers.make_message(now), now)
        other.peers.receive(one.peers.make_message(now), now)
        assert not one.fleet.quarantine.is_blocked(7, now)
    other.fleet.quarantine.succeeded(8)
    one.peers.receive(other.peers.make_message(11.0), 11.0)
    assert one.fleet.quarantine.is_blocked(7, 11.0) and other.fleet.quarantine.is_blocked(7, 11.0)


def test_a_prompt_is_published_when_its_response_is_complete() -> None:
    one, other = PeerGateway(), PeerGateway()
    sent = one.b.send(long_call(), 0.0)
    other.peers.receive(one.peers.make_message(0.0), 0.0)
    assert len(other.b.cache) == 0
    sent.end(1.0, answered=False)
    assert one.peers.make_message(1.0), "its load has changed"
    one.answers(long_call(), 1.0)
    other.peers.receive(one.peers.make_message(2.0), 2.0)
    assert len(other.b.cache) == len(one.b.cache) > 0


def test_a_peers_calls_in_flight_count_until_they_end() -> None:
    one, other = PeerGateway(), PeerGateway()
    call = long_call()
    sent = one.a.send(call, 0.0)
    other.peers.receive(one.peers.make_message(0.0), 0.0)
    assert other.a.estimate.peers == PeerLoad(1, call.prompt_tokens_estimate)
    assert other.a.estimate.total_in_flight(0.0) == 1
    assert other.a.estimate.queued_tokens(0.0) == call.prompt_tokens_estimate
    assert other.first_choice(call) == "b"
    assert not one.peers.make_message(LOAD_REPEAT_SECONDS / 2), "nothing has changed"
    sent.first_chunk(1.0)
    other.peers.receive(one.peers.make_message(1.0), 1.0)
    assert other.a.estimate.peers == PeerLoad(1, 0)
    sent.end(1.0)
    other.peers.receive(one.peers.make_message(1.0), 1.0)
    assert other.a.estimate.peers == NO_PEER_LOAD


def test_the_load_of_a_silent_peer_expires() -> None:
    silent, live, receiver = PeerGateway(), PeerGateway(), PeerGateway()
    silent.a.send(long_call(), 0.0)
    live.a.send(long_call("twice "), 0.0)
    for each in (silent, live):
        receiver.peers.receive(each.peers.make_message(0.0), 0.0)
    assert (receiver.a.estimate.peers.in_flight, receiver.peers.live_peers) == (2, 2)
    receiver.peers.receive(live.peers.make_message(LOAD_REPEAT_SECONDS), LOAD_REPEAT_SECONDS)
    receiver.peers.expire_silent(SILENT_SECONDS)
    assert (receiver.a.estimate.peers.in_flight, receiver.peers.live_peers) == (1, 1)


def test_peers_conversations_claim_their_room() -> None:
    policy = a_policy(rules=[{"match": {"service_tier": "flex"}, "class": "batch"}])
    one, other = PeerGateway(policy), PeerGateway(policy)
    for each in (one, other):  # both have seen batch calls
        each.fleet.working_set.admit(a_call(chat("x" * 400, service_tier="flex"), policy), [each.b.estimate], 0.0)
    for words in (4000, 4500):
        one.answers(a_call(chat("once " * words, service_tier="flex"), policy))
        other.peers.receive(one.peers.make_message(0.0), 0.0)
    claimed = one.fleet.working_set.claimed_tokens(one.b.estimate)
    assert other.fleet.working_set.claimed_tokens(other.b.estimate) == claimed > 4500


def test_two_gateways_do_not_give_away_the_same_room() -> None:
    policy = a_policy(rules=[{"match": {"service_tier": "flex"}, "class": "batch"}])
    one, rival = PeerGateway(policy), PeerGateway(policy)

    def fits(words: int) -> bool:
        call = a_call(chat("more " * words, service_tier="flex"), policy)
        return one.fleet.working_set.admit(call, [one.b.estimate], 0.0)

    one.b.cache.resize(20_000)
    for words in (4000, 4500):
        call = a_call(chat("once " * words, service_tier="flex"), policy)
        assert one.fleet.working_set.admit(call, [one.b.estimate], 0.0)
        one.answers(call)
    rival.a.send(long_call(), 0.0)
    one.peers.receive(rival.peers.make_message(0.0), 0.0)
    assert not fits(6000)
    one.peers.expire_silent(SILENT_SECONDS)
    assert fits(6000)


def test_own_and_malformed_messages_change_nothing() -> None:
    one = PeerGateway()
    one.answers(long_call())
    clock = one.b.cache.clock
    one.peers.receive(one.peers.make_message(0.0), 0.0)
    assert one.b.cache.clock == clock
    for message in (b"", b"\xc1", msgspec.msgpack.encode([2, "otherwise"])):
        one.peers.receive(message, 0.0)
    assert one.peers.malformed == 3
    assert one.peers.live_peers == 0


def test_a_deployment_at_another_address_is_another_deployment() -> None:
    moved = a_policy().model_dump(by_alias=True)
    moved["deployments"][1]["base_url"] = "http://elsewhere.invalid/v1"
    one, other = PeerGateway(), PeerGateway(Policy.model_validate(moved))
    one.answers(long_call())
    one.b.send(long_call(), 0.0)
    other.peers.receive(one.peers.make_message(0.0), 0.0)
    assert len(other.b.cache) == 0
    assert other.b.estimate.peers == NO_PEER_LOAD


def test_cache_slots_learn_from_peers() -> None:
    whole = a_policy().model_dump(by_alias=True)
    for deployment in whole["deployments"]:
        deployment.update(provider="llamacpp", slots=2, max_concurrency=2)
    policy = Policy.model_validate(whole)
    one, other = PeerGateway(policy), PeerGateway(policy)
    calls = [long_call(), long_call("twice ")]
    assert [one.answers(call).cache_slot for call in calls] == [0, 1]
    other.peers.receive(one.peers.make_message(0.0), 0.0)
    assert other.b.cache_slots is not None
    assert [other.b.cache_slots.choose_slot(call.fingerprint) for call in calls] == [0, 1]
    assert other.first_choice(calls[1]) == "b"


def test_large_updates_are_split_and_old_calls_are_dropped() -> None:
    one, other = PeerGateway(), PeerGateway()
    calls = [long_call(f"{number} ") for number in range(400)]
    for call in calls:
        one.answers(call)
    messages = []
    while message := one.peers.make_message(0.0):
        messages.append(message)
        other.peers.receive(message, 0.0)
    assert len(messages) > 1
    assert max(map(len, messages)) < 10 * MESSAGE_MAX_BLOCKS
    assert other.peers.calls_received == 400
    short = a_call(chat("x" * 400))
    for _ in range(OUTBOX_MAX_CALLS + 5):
        one.answers(short)
    while message := one.peers.make_message(0.0):
        other.peers.receive(message, 0.0)
    assert other.peers.calls_received == 400 + OUTBOX_MAX_CALLS


@pytest.fixture(params=["sqlite", "redis"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[list[Storage]]:
    """The same storage, as two gateways open it."""
    engines: list[Storage]
    if request.param == "sqlite":
        engines = [SqliteStorage(f"sqlite:///{tmp_path / 'state.db'}", timeout_seconds=60.0) for _ in range(2)]
    else:
        deployment: RedisServer = request.getfixturevalue("redis_server")
        with deployment.client() as client:
            client.flushall()
        engines = [RedisStorage(deployment.url, timeout_seconds=60.0) for _ in range(2)]
    for engine in engines:
        await engine.open()
    yield engines
    for engine in engines:
        await engine.close()


async def test_through_a_storage(stores: list[Storage]) -> None:
    one, other = PeerGateway(), PeerGateway()
    sharing = [ReplicaSync(each.peers, store) for each, store in zip((one, other), stores, strict=True)]
    call = long_call()
    one.answers(call)
    one.b.send(long_call("twice "), 0.0)
    for each in sharing:
        await each.exchange()
    assert other.b.estimate.peers.in_flight == 1
    assert other.b.cache.match(call.fingerprint) == len(call.fingerprint)
    late = PeerGateway()
    await ReplicaSync(late.peers, stores[1]).exchange()
    assert late.b.cache.match(call.fingerprint) == len(call.fingerprint), "late gateways read earlier messages"


class UnavailableStorage:
    is_shared: ClassVar = True
    exchanges = 0
    is_back = False

    async def publish_and_read(self, message: bytes, after: str) -> tuple[list[bytes], str]:
        self.exchanges += 1
        if self.is_back:
            return [], after
        raise StorageUnavailable("Redis cannot be reached")


async def test_peer_loads_expire_while_the_storage_is_down(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.deployments.replica_sync.SILENT_SECONDS", 0.0)
    one, other, store = PeerGateway(), PeerGateway(), UnavailableStorage()
    one.a.send(long_call(), 0.0)
    other.peers.receive(one.peers.make_message(0.0), asyncio.get_running_loop().time())
    sharing = ReplicaSync(other.peers, store)
    await sharing.exchange()
    await sharing.exchange()
    assert store.exchanges == 2
    assert other.a.estimate.peers == NO_PEER_LOAD
    store.is_back = True
    await sharing.exchange()
    await sharing.exchange()
    assert [record.getMessage() for record in caplog.records] == [
        "replica sync paused: Redis cannot be reached",
        "replica sync resumed",
    ]


async def test_the_sync_runs_until_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.deployments.replica_sync.EXCHANGE_SECONDS", 0.0)
    exchanged = asyncio.Event()

    class Store(MemoryStorage):
        count = 0

        async def publish_and_read(self, message: bytes, after: str) -> tuple[list[bytes], str]:
            self.count += 1
            if self.count == 3:
                exchanged.set()
            return await super().publish_and_read(message, after)

    store: PeerMessages = Store()
    task = asyncio.create_task(ReplicaSync(PeerGateway().peers, store).run())
    async with asyncio.timeout(20):
        await exchanged.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_a_conversation_that_has_moved_has_moved_for_peers() -> None:
    one, other = PeerGateway(), PeerGateway()
    call = long_call()
    for gateway in (one, other):
        gateway.a.cache.add(call.fingerprint)
    sent = one.b.send(call, 0.0)
    sent.expect_loaded(one.a, len(call.fingerprint), moves=True)
    sent.first_chunk(0.0)
    sent.end(0.0)
    assert one.a.cache.match(call.fingerprint) == 0
    other.peers.receive(one.peers.make_message(0.0), 0.0)
    assert other.a.cache.match(call.fingerprint) == 0
    assert other.b.cache.match(call.fingerprint) == len(call.fingerprint)
