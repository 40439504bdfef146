"""Two gateways before the same two engines: what one has sent where, the other knows; without their Redis, too, they
go on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import DEMO, Gateway, Running, deployment, engine, gateway, tenant, until
from tests.redis_server import RedisServer, own_redis_server

__all__ = ["own_redis_server"]
pytestmark = pytest.mark.e2e

CONVERSATIONS, TURNS = 4, 3
WORDS = 150  # of a conversation's beginning: many blocks


@contextmanager
def fleet(folder: Path, engines: list[Running], storage: str) -> Iterator[list[Gateway]]:
    """Each server has one place at each gateway, so that two calls at a time need both."""
    names = [f"engine-{number}" for number in range(len(engines))]
    policy = {
        "deployments": [
            deployment(name, each.url, max_concurrency=1) for name, each in zip(names, engines, strict=True)
        ],
        "models": [{"name": DEMO, "deployments": names}],
        "tenants": [tenant("dev")],
        "storage_outage": {"limits": "local_share", "replicas": 2},
    }
    with ExitStack() as started:
        yield [
            started.enter_context(gateway(folder / name, policy, storage=storage, replica=name)) for name in ("a", "b")
        ]


class Conversation:
    def __init__(self, number: int) -> None:
        opening = " ".join(f"{number}-{word}" for word in range(WORDS))
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": opening}]
        self.servers: list[str] = []
        self.cached: list[int] = []

    def take_turn(self, front: Gateway) -> None:
        body = {"model": DEMO, "messages": self.messages, "max_tokens": 8}
        reply = front.post("chat/completions", body)
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        self.servers.append(reply.headers["x-warmpath-deployment"])
        self.cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        self.messages += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]


def open_side_by_side(front: Gateway) -> list[Conversation]:
    conversations = [Conversation(number) for number in range(CONVERSATIONS)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda conversation: conversation.take_turn(front), conversations))
    assert len({server for conversation in conversations for server in conversation.servers}) == 2
    return conversations


def test_conversations_that_alternate_between_gateways_stay_where_they_are_warm(
    tmp_path: Path, own_redis_server: RedisServer
) -> None:
    with ExitStack() as started:
        engines = [started.enter_context(engine(tmp_path / f"engine-{number}")) for number in range(2)]
        fronts = started.enter_context(fleet(tmp_path, engines, own_redis_server.url))
        conversations = open_side_by_side(fronts[0])
        for turn in range(1, TURNS):
            all_are_heard_of(fronts, conversations)
            for conversation in conversations:  # one at a time: both servers are idle, and only what is warm decides
                conversation.take_turn(fronts[turn % 2])
                assert conversation.servers[-1] == conversation.servers[0]
                assert conversation.cached[-1] > WORDS
        all_are_heard_of(fronts, conversations)
        own_redis_server.stop()
        for conversation in conversations:
            conversation.take_turn(fronts[0])
        assert "other gateways are not heard of" in until(lambda: fronts[0].log.read_text())
        own_redis_server.start()
        all_are_heard_of(fronts, conversations)


def all_are_heard_of(fronts: list[Gateway], conversations: list[Conversation]) -> None:
    """Every call by the gateway that did not answer it."""
    told = sum(len(conversation.servers) for conversation in conversations)
    until(lambda: sum(front.metric("warmpath_calls_heard_total") for front in fronts) >= told)
