"""What replicas agree on, what a conversation keeps, and the bounds of both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.core.errors import StorageUnavailable
from gateway.endpoints import ENDPOINTS
from gateway.policy import Policy
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.prompts.transforms import shared_decisions
from gateway.prompts.transforms.shared_decisions import MAX_RECALLED, DecisionNotLoaded, SharedDecisions
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


async def ask(replica: Canonicaliser, policy: Policy, body: dict[str, Any]) -> Call:
    return await replica.canonicalised(
        ENDPOINTS[0], json.dumps({"model": "m", **body}).encode(), {}, call_id="c",
        principal=Principal(policy.tenants_by_name["t"], "k"), policy=policy, now=0.0, trace=UNTRACED,
    )  # fmt: skip


async def written(replica: Canonicaliser) -> None:
    """Until what it has decided is in the storage."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_replicas_follow_the_one_that_saw_a_schema_first(storage: MemoryStorage) -> None:
    policy = a_policy()
    first, second = (Canonicaliser(b"secret", storage) for _ in range(2))
    one = await ask(first, policy, {"messages": HELLO, "tools": [ONE]})
    await written(first)
    other = await ask(second, policy, {"messages": HELLO, "tools": [OTHER]})
    assert bytes(one.fields["tools"]) == bytes(other.fields["tools"])
    assert "order_memo" in other.canonical_steps
    await first.close()
    await second.close()


async def test_two_that_decide_at_once_come_to_agree(storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_decisions, "CONFIRM_SECONDS", 0.0)
    replicas = [SharedDecisions(storage) for _ in range(2)]
    for replica, value in zip(replicas, (b"a", b"b"), strict=True):
        await replica.recall(["key"])
        replica.keep("key", value)
    for _ in range(50):
        await asyncio.sleep(0)
    assert replicas[0].find("key") == replicas[1].find("key")
    assert sum(replica.generation for replica in replicas) == 1


async def test_what_the_storage_says_is_checked(storage: MemoryStorage) -> None:
    """A form that means something else is not taken, whoever has put it there."""
    policy = a_policy()
    replica = Canonicaliser(b"secret", storage)
    await ask(replica, policy, {"messages": HELLO, "tools": [ONE]})
    await written(replica)
    (key,) = (key for key in storage._blobs if "schema" in key)
    await storage.put(key, b'{"type":"function","function":{"name":"evil"}}', ttl_seconds=60)
    fresh = Canonicaliser(b"secret", storage)
    call = await ask(fresh, policy, {"messages": HELLO, "tools": [OTHER]})
    assert json.loads(bytes(call.fields["tools"])) == [OTHER]
    await replica.close()
    await fresh.close()


class Away(MemoryStorage):
    """A storage that does not answer."""

    asked = 0

    async def get(self, key: str) -> bytes | None:
        self.asked += 1
        raise StorageUnavailable("away")


async def test_without_its_storage_a_replica_decides_alone() -> None:
    storage, policy = Away(), a_policy()
    replica = Canonicaliser(b"secret", storage)
    for tools in ([ONE], [OTHER]):
        call = await ask(replica, policy, {"messages": HELLO, "tools": tools})
        assert json.dumps(json.loads(bytes(call.fields["tools"]))) == json.dumps([ONE])
    await replica.close()


async def test_no_request_asks_the_storage_for_more_than_its_bound() -> None:
    storage, policy = Away(), a_policy()
    replica = Canonicaliser(b"secret", storage)
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(3 * MAX_RECALLED)]
    await ask(replica, policy, {"messages": HELLO, "tools": tools})
    assert storage.asked <= MAX_RECALLED + 1 + shared_decisions.MAX_TASKS
    asked = storage.asked
    await ask(replica, policy, {"messages": HELLO, "tools": tools})
    assert storage.asked == asked, "what is known to be absent is not asked for again"
    await replica.close()


async def test_memory_is_bounded_and_forgets_the_longest_unused() -> None:
    memory = SharedDecisions(max_bytes=10_000)
    for i in range(100):
        memory.keep(f"key{i}", bytes(1000))
        memory.find("key0")
    assert memory._bytes <= 10_000
    assert memory.find("key0") is not None
    assert memory.find("key1") is None


async def test_what_is_not_in_memory_is_told() -> None:
    memory = SharedDecisions(Away())
    with pytest.raises(DecisionNotLoaded) as missing:
        memory.find("a")
    await memory.recall(missing.value.keys)
    assert memory.find("a") is None


def steps(call: Call) -> bool:
    return "volatile_to_end" in call.canonical_steps


async def test_a_conversation_goes_on_as_it_began_when_the_policy_changes(storage: MemoryStorage) -> None:
    old, new = a_policy(canonicalise=OLD), a_policy(canonicalise=NEW)
    replica = Canonicaliser(b"secret", storage)
    assert not steps(await ask(replica, old, {"messages": [CLOCKED, *HELLO]}))
    assert not steps(await ask(replica, new, {"messages": ANSWERED})), "it began before the change"
    begun = [CLOCKED, {"role": "user", "content": "another"}]
    assert steps(await ask(replica, new, {"messages": begun}))
    later = {"messages": [*begun, *ANSWERED[2:]]}
    assert steps(await ask(replica, new, later)), "it began after the change"
    await written(replica)
    other = Canonicaliser(b"secret", storage)
    assert steps(await ask(other, new, later)), "also at another replica"
    assert not steps(await ask(other, new, {"messages": ANSWERED})), "which has never seen the old policy"
    await replica.close()
    await other.close()


async def test_long_after_a_change_all_conversations_follow_it(storage: MemoryStorage) -> None:
    old, new = a_policy(canonicalise=OLD), a_policy(canonicalise=NEW)
    replica = Canonicaliser(b"secret", storage)
    now = 0.0
    replica._canon.plans._clock = lambda: now
    await ask(replica, old, {"messages": HELLO})
    assert not steps(await ask(replica, new, {"messages": ANSWERED}))
    now = 86401.0
    assert steps(await ask(replica, new, {"messages": ANSWERED}))
    await replica.close()


async def test_a_version_that_is_gone_is_not_followed(storage: MemoryStorage) -> None:
    plan = {"version": 0, "level": "safe"}
    await storage.put("canonical:plan:t/m", json.dumps({"plan": plan, "changed": 0}).encode(), ttl_seconds=60)
    replica = Canonicaliser(b"secret", storage)
    assert steps(await ask(replica, a_policy(canonicalise=NEW), {"messages": ANSWERED}))
    await replica.close()


async def test_a_memory_that_holds_nothing_is_asked_no_more_than_its_bound() -> None:
    """What is fetched is crowded out before it can be used: the request is served all the same."""
    storage, policy = Away(), a_policy()
    replica = Canonicaliser(b"secret", storage)
    replica._canon.memory._max_bytes = 1
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(5)]
    call = await asyncio.wait_for(ask(replica, policy, {"messages": HELLO, "tools": tools}), 10)
    assert json.loads(bytes(call.fields["tools"])) == tools
    await replica.close()


async def test_more_tools_than_can_be_remembered_go_as_they_came() -> None:
    policy, replica = a_policy(), Canonicaliser(b"secret", Away())
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(5000)]
    call = await ask(replica, policy, {"messages": HELLO, "tools": tools})
    assert json.loads(bytes(call.fields["tools"])) == tools
    assert len(replica._canon.memory._entries) < 10
    await replica.close()
