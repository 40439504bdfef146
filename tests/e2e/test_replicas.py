"""Two gateways in front of the same engines share cache estimates, and work without Redis and without each other."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.processes import DEMO, Gateway, Running, deployment, endless, engine, gateway, key, tenant, until
from tests.redis_server import RedisServer, own_redis_server

__all__ = ["own_redis_server"]
pytestmark = [pytest.mark.e2e, pytest.mark.slow(seconds=12)]

CONVERSATIONS, TURNS = 4, 3
WORDS = 150  # length of a conversation's first message: many blocks


@contextmanager
def fleet(folder: Path, engines: list[Running], storage: str) -> Iterator[list[Gateway]]:
    """Two gateways. Each deployment has one slot per gateway, so that two concurrent calls need both deployments."""
    policy = policy_of(engines)
    with ExitStack() as started:
        yield [
            started.enter_context(gateway(folder / name, policy, storage=storage, replica=name)) for name in ("a", "b")
        ]


def policy_of(engines: list[Running]) -> dict[str, Any]:
    names = [f"engine-{number}" for number in range(len(engines))]
    return {
        "deployments": [
            deployment(name, each.url, max_concurrency=1) for name, each in zip(names, engines, strict=True)
        ],
        "models": [{"name": DEMO, "deployments": names}],
        "tenants": [tenant("dev")],
        "storage_outage": {"limits": "local_share", "replicas": 2},
    }


class Conversation:
    def __init__(self, number: int) -> None:
        opening = " ".join(f"{number}-{word}" for word in range(WORDS))
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": opening}]
        self.deployments: list[str] = []
        self.cached: list[int] = []
        self.answers: list[str] = []

    def take_turn(self, front: Gateway) -> None:
        body = {"model": DEMO, "messages": self.messages, "max_tokens": 8, "temperature": 0}
        reply = front.post("chat/completions", body)
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        self.answers.append(answer["choices"][0]["message"]["content"])
        self.deployments.append(reply.headers["x-warmpath-deployment"])
        self.cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        self.messages += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]


def start_conversations(front: Gateway) -> list[Conversation]:
    conversations = [Conversation(number) for number in range(CONVERSATIONS)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda conversation: conversation.take_turn(front), conversations))
    assert len({name for conversation in conversations for name in conversation.deployments}) == 2
    return conversations


def test_conversations_that_alternate_between_gateways_stay_on_their_deployments(
    tmp_path: Path, own_redis_server: RedisServer
) -> None:
    with ExitStack() as started:
        engines = [started.enter_context(engine(tmp_path / f"engine-{number}")) for number in range(2)]
        fronts = started.enter_context(fleet(tmp_path, engines, own_redis_server.url))
        conversations = start_conversations(fronts[0])
        for turn in range(1, TURNS):
            wait_for_sync(fronts, conversations)
            for (
                conversation
            ) in conversations:  # one at a time: both deployments are idle, so that only the cache estimate decides
                conversation.take_turn(fronts[turn % 2])
                assert conversation.deployments[-1] == conversation.deployments[0]
                assert conversation.cached[-1] > WORDS
        wait_for_sync(fronts, conversations)
        own_redis_server.stop()
        for conversation in conversations:
            conversation.take_turn(fronts[0])
        assert "replica sync paused" in until(lambda: fronts[0].log.read_text())
        own_redis_server.start()
        wait_for_sync(fronts, conversations)


def test_a_killed_gateway_loses_no_other_answers_and_its_estimates_stay_known(
    tmp_path: Path, own_redis_server: RedisServer
) -> None:
    """It is killed with a call in flight. The other gateway continues its conversations, with its synced estimates."""
    with ExitStack() as started:
        engines = [started.enter_context(engine(tmp_path / f"engine-{number}")) for number in range(2)]
        doomed, other = started.enter_context(fleet(tmp_path, engines, own_redis_server.url))
        conversations = start_conversations(doomed)
        wait_for_sync([doomed, other], conversations)
        headers = {"authorization": f"Bearer {key('dev')}"}
        url = f"{doomed.url}/v1/chat/completions"
        with httpx2.stream("POST", url, json=endless(), headers=headers, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            doomed.kill()
            with pytest.raises(httpx2.TransportError):
                list(lines)
        until(lambda: all(each.metric("vllm:num_requests_running") == 0 for each in engines))
        until(lambda: other.metric("warmpath_gateways_heard") == 0)  # the killed gateway's load has expired
        for conversation in conversations:  # both deployments are idle, so that only the cache estimate decides
            conversation.take_turn(other)
            assert conversation.cached[-1] > WORDS, "the killed gateway had synced where the prefix is cached"
        unsynced = Conversation(CONVERSATIONS)
        with gateway(tmp_path / "again", policy_of(engines), storage=own_redis_server.url, replica="a") as again:
            unsynced.take_turn(again)
            again.kill()
        unsynced.take_turn(other)  # with or without a cache hit
        for conversation in [*conversations, unsynced]:
            for turn, answer in enumerate(conversation.answers):
                assert answer == answer_of(engines[0], conversation.messages[: 2 * turn + 1])


def answer_of(served: Running, messages: list[dict[str, Any]]) -> str:
    """The engine's own answer, without cached tokens."""
    body = {"model": DEMO, "messages": messages, "max_tokens": 8, "temperature": 0, "cache_salt": secrets.token_hex(8)}
    reply = httpx2.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    return str(reply.json()["choices"][0]["message"]["content"])


def wait_for_sync(fronts: list[Gateway], conversations: list[Conversation]) -> None:
    """Wait until each gateway has received the calls that the other one answered."""
    calls = sum(len(conversation.deployments) for conversation in conversations)
    until(lambda: sum(front.metric("warmpath_calls_heard_total") for front in fronts) >= calls)
