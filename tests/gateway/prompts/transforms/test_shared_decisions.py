"""Shared decisions of replicas, the plans of running conversations, and their bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.core.errors import StorageUnavailable
from gateway.endpoints import ENDPOINTS
from gateway.policy import Policy
from gateway.prefix.fingerprint import FingerprintCache
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.prompts.transforms import shared_decisions
from gateway.prompts.transforms.shared_decisions import MAX_LOADED, DecisionNotLoaded, SharedDecisions
from gateway.storage.memory import MemoryStorage
from gateway.types import Call, Principal
from tests.gateway.calls import UNTRACED, a_policy

ONE = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
OTHER = {"function": {"parameters": {"properties": {}, "type": "object"}, "name": "f"}, "type": "function"}
HELLO = [{"role": "user", "content": "hello"}]
OLD, NEW = ({"level": level, "opt_in": opt_in} for level, opt_in in (("safe", []), ("full", ["volatile_to_end"])))
CLOCKED = {"role": "system", "content": "Current time: 09:41\nYou are X."}
ANSWERED = [CLOCKED, *HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "more"}]


@pytest.fixture
async def storage() -> AsyncIterator[MemoryStorage]:
    storage = MemoryStorage()
    await storage.open()
    yield storage
    await storage.close()


async def canonicalise_at(replica: Canonicaliser, policy: Policy, body: dict[str, Any]) -> Call:
    return await replica.load_and_canonicalise(
        ENDPOINTS[0], json.dumps({"model": "m", **body}).encode(), {}, call_id="c",
        principal=Principal(policy.tenants_by_name["t"], "k"), policy=policy, now=0.0, trace=UNTRACED,
    )  # fmt: skip


async def written(replica: Canonicaliser) -> None:
    """Wait until the replica's decisions are in the storage."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_replicas_follow_the_first_decision(storage: MemoryStorage) -> None:
    policy = a_policy()
    first, second = (Canonicaliser(b"secret", storage) for _ in range(2))
    one = await canonicalise_at(first, policy, {"messages": HELLO, "tools": [ONE]})
    await written(first)
    other = await canonicalise_at(second, policy, {"messages": HELLO, "tools": [OTHER]})
    assert bytes(one.fields["tools"]) == bytes(other.fields["tools"])
    assert "order_memo" in other.canonical_steps
    await first.close()
    await second.close()


async def test_simultaneous_decisions_converge(storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_decisions, "CONFIRM_SECONDS", 0.0)
    replicas = [SharedDecisions(storage) for _ in range(2)]
    for replica, value in zip(replicas, (b"a", b"b"), strict=True):
        await replica.load(["key"])
        replica.decide("key", value)
    for _ in range(50):
        await asyncio.sleep(0)
    assert replicas[0].find("key") == replicas[1].find("key")
    assert sum(replica.generation for replica in replicas) == 1


async def test_a_decision_from_the_storage_is_checked(storage: MemoryStorage) -> None:
    """A stored form with another meaning is not used."""
    policy = a_policy()
    replica = Canonicaliser(b"secret", storage)
    await canonicalise_at(replica, policy, {"messages": HELLO, "tools": [ONE]})
    await written(replica)
    (key,) = (key for key in storage._blobs if "canonical:form" in key)
    await storage.put(key, b'{"type":"function","function":{"name":"evil"}}', ttl_seconds=60)
    fresh = Canonicaliser(b"secret", storage)
    call = await canonicalise_at(fresh, policy, {"messages": HELLO, "tools": [OTHER]})
    assert json.loads(bytes(call.fields["tools"])) == [OTHER]
    await replica.close()
    await fresh.close()


class UnavailableStorage(MemoryStorage):
    """A storage that does not answer."""

    asked = 0

    async def get(self, key: str) -> bytes | None:
        self.asked += 1
        raise StorageUnavailable("away")


async def test_a_replica_without_storage_decides_alone() -> None:
    storage, policy = UnavailableStorage(), a_policy()
    replica = Canonicaliser(b"secret", storage)
    for tools in ([ONE], [OTHER]):
        call = await canonicalise_at(replica, policy, {"messages": HELLO, "tools": tools})
        assert json.dumps(json.loads(bytes(call.fields["tools"]))) == json.dumps([ONE])
    await replica.close()


async def test_a_prompt_is_fingerprinted_once(storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the request is canonicalised several times, because decisions have to be loaded first."""
    attempts, hashed = [0], [0]
    canonicalise, fingerprint = Canonicaliser.canonicalise, FingerprintCache.fingerprint

    def counted_attempt(*given: Any, **named: Any) -> Call:
        attempts[0] += 1
        return canonicalise(*given, **named)

    def counted_fingerprint(*given: Any) -> tuple[int, ...]:
        hashed[0] += 1
        return fingerprint(*given)

    monkeypatch.setattr(Canonicaliser, "canonicalise", counted_attempt)
    monkeypatch.setattr(FingerprintCache, "fingerprint", counted_fingerprint)
    replica = Canonicaliser(b"secret", storage)
    await canonicalise_at(replica, a_policy(), {"messages": HELLO, "tools": [ONE]})
    assert (attempts, hashed) == ([3], [1])
    await replica.close()


async def test_storage_reads_per_request_are_bounded() -> None:
    storage, policy = UnavailableStorage(), a_policy()
    replica = Canonicaliser(b"secret", storage)
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(3 * MAX_LOADED)]
    await canonicalise_at(replica, policy, {"messages": HELLO, "tools": tools})
    assert storage.asked <= MAX_LOADED + 1 + shared_decisions.MAX_TASKS
    asked = storage.asked
    await canonicalise_at(replica, policy, {"messages": HELLO, "tools": tools})
    assert storage.asked == asked, "what is known to be absent is not asked for again"
    await replica.close()


async def test_memory_is_bounded_and_evicts_the_least_recently_used() -> None:
    decisions = SharedDecisions(max_bytes=10_000)
    for i in range(100):
        decisions.decide(f"key{i}", bytes(1000))
        decisions.find("key0")
    assert decisions._bytes <= 10_000
    assert decisions.find("key0") is not None
    assert decisions.find("key1") is None


async def test_an_unknown_key_raises_decision_not_loaded() -> None:
    decisions = SharedDecisions(UnavailableStorage())
    with pytest.raises(DecisionNotLoaded) as missing:
        decisions.find("a")
    await decisions.load(missing.value.keys)
    assert decisions.find("a") is None


def steps(call: Call) -> bool:
    return "volatile_to_end" in call.canonical_steps


async def test_a_running_conversation_keeps_its_plan_when_the_policy_changes(storage: MemoryStorage) -> None:
    old, new = a_policy(canonicalise=OLD), a_policy(canonicalise=NEW)
    replica = Canonicaliser(b"secret", storage)
    assert not steps(await canonicalise_at(replica, old, {"messages": [CLOCKED, *HELLO]}))
    assert not steps(await canonicalise_at(replica, new, {"messages": ANSWERED})), "it began before the change"
    begun = [CLOCKED, {"role": "user", "content": "another"}]
    assert steps(await canonicalise_at(replica, new, {"messages": begun}))
    later = {"messages": [*begun, *ANSWERED[2:]]}
    assert steps(await canonicalise_at(replica, new, later)), "it began after the change"
    await written(replica)
    other = Canonicaliser(b"secret", storage)
    assert steps(await canonicalise_at(other, new, later)), "also at another replica"
    assert not steps(await canonicalise_at(other, new, {"messages": ANSWERED})), "which has never seen the old policy"
    await replica.close()
    await other.close()


async def test_long_after_a_change_all_conversations_follow_it(storage: MemoryStorage) -> None:
    old, new = a_policy(canonicalise=OLD), a_policy(canonicalise=NEW)
    replica = Canonicaliser(b"secret", storage)
    now = 0.0
    replica._pipeline.plans._clock = lambda: now
    await canonicalise_at(replica, old, {"messages": HELLO})
    assert not steps(await canonicalise_at(replica, new, {"messages": ANSWERED}))
    now = 86401.0
    assert steps(await canonicalise_at(replica, new, {"messages": ANSWERED}))
    await replica.close()


async def test_an_unsupported_version_is_not_followed(storage: MemoryStorage) -> None:
    plan = {"version": 0, "level": "safe"}
    await storage.put("canonical:plan:t/m", json.dumps({"plan": plan, "changed": 0}).encode(), ttl_seconds=60)
    replica = Canonicaliser(b"secret", storage)
    assert steps(await canonicalise_at(replica, a_policy(canonicalise=NEW), {"messages": ANSWERED}))
    await replica.close()


async def test_a_full_memory_does_not_cause_endless_loads() -> None:
    """Loaded decisions are evicted before they can be used. The request is served nevertheless."""
    storage, policy = UnavailableStorage(), a_policy()
    replica = Canonicaliser(b"secret", storage)
    replica._pipeline.decisions._max_bytes = 1
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(5)]
    call = await asyncio.wait_for(canonicalise_at(replica, policy, {"messages": HELLO, "tools": tools}), 10)
    assert json.loads(bytes(call.fields["tools"])) == tools
    await replica.close()


async def test_too_many_tools_are_passed_on_unchanged() -> None:
    policy, replica = a_policy(), Canonicaliser(b"secret", UnavailableStorage())
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(5000)]
    call = await canonicalise_at(replica, policy, {"messages": HELLO, "tools": tools})
    assert json.loads(bytes(call.fields["tools"])) == tools
    assert len(replica._pipeline.decisions._entries) < 10
    await replica.close()
