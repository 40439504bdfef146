"""Idempotency keys with the unmodified clients of OpenAI and Anthropic, on two gateways with one Redis."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.processes import (
    DEMO,
    PATIENCE_SECONDS,
    Gateway,
    Running,
    Wire,
    chat,
    endless,
    gateway,
    key,
    simple_policy,
    until,
)
from tests.redis_server import RedisServer, own_redis_server

__all__ = ["own_redis_server"]
pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def ask(client: openai.OpenAI, name: str, **fields: Any) -> Any:
    options: Any = {**chat("Tell me something.", max_tokens=12), **fields}
    return client.chat.completions.with_raw_response.create(**options, extra_headers={"Idempotency-Key": name})


def test_two_gateways_answer_a_key_once_even_if_one_is_killed(
    tmp_path: Path, local_engine: Running, own_redis_server: RedisServer
) -> None:
    policy, storage = simple_policy(local_engine.url), own_redis_server.url
    with (
        gateway(tmp_path / "a", policy, storage=storage, replica="a") as a,
        gateway(tmp_path / "b", policy, storage=storage, replica="b") as b,
    ):
        _check_replayed(a, b)
        _check_streams_joined(a, b)
        _check_anthropic(a, b)
        with Wire(a, "chat/completions", endless(), **{"idempotency-key": "killed"}) as wire:
            wire.read_until(b"data: ", times=3)
            a.kill()
        with b.client() as client, pytest.raises(openai.UnprocessableEntityError):
            ask(client, "killed")  # another body
        done = b.post("chat/completions", endless(), **{"idempotency-key": "killed"})  # waits for the dead one's lease
        again = b.post("chat/completions", endless(), **{"idempotency-key": "killed"})
        assert done.content == again.content and done.content.endswith(b"data: [DONE]\n\n")
        assert "idempotent-replayed" not in done.headers and again.headers["idempotent-replayed"] == "true"
        assert len(b.receipts(call_id=done.headers["x-request-id"])) == 1


def _check_replayed(a: Gateway, b: Gateway) -> None:
    with a.client() as one, b.client() as two:
        first, second = ask(one, "whole"), ask(two, "whole")
        assert second.content == first.content and second.parse().usage == first.parse().usage
        assert second.headers["x-warmpath-replayed-request"] == first.headers["x-request-id"]
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            ask(two, "whole", max_tokens=13)
        assert caught.value.code == "idempotency_key_reused"
        assert (len(a.receipts()), len(b.receipts())) == (1, 0)


def _check_streams_joined(a: Gateway, b: Gateway) -> None:
    """Requests of one key on both gateways at the same time: all get one answer, which is billed once."""
    before = len(a.receipts()) + len(b.receipts())
    body = chat("Count to ten.", stream=True, max_tokens=200, ignore_eos=True)
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(each.post, "chat/completions", body, **{"idempotency-key": "s"}) for each in (a, b) * 3]
        replies = [each.result(PATIENCE_SECONDS) for each in asked]
    assert len({reply.content for reply in replies}) == 1 and replies[0].content.endswith(b"data: [DONE]\n\n")
    assert len(a.receipts()) + len(b.receipts()) == before + 1
    with Wire(a, "chat/completions", endless("One."), **{"idempotency-key": "left"}) as wire:
        wire.read_until(b"data: ", times=3)
        call_id = wire.header("x-request-id")
    reply = b.post("chat/completions", endless("One."), **{"idempotency-key": "left"})
    assert reply.headers["x-warmpath-replayed-request"] == call_id and reply.content.endswith(b"data: [DONE]\n\n")
    assert until(lambda: a.receipts(call_id=call_id))[0]["outcome"] == "client_gone"


def _check_anthropic(a: Gateway, b: Gateway) -> None:
    contents = []
    for each in (a, b):
        with anthropic.Anthropic(base_url=each.url, api_key=key("dev"), max_retries=0) as client:
            reply = client.messages.with_raw_response.create(
                model=DEMO,
                max_tokens=8,
                messages=[{"role": "user", "content": "Hello"}],
                extra_headers={"Idempotency-Key": "m"},
            )
            contents.append(reply.read())
    assert contents[0] == contents[1]
