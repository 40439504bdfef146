"""llama.cpp's cache slots, through the whole gateway: a scripted server chooses slots like llama-server does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.policy import Deployment
from gateway.providers import make_provider
from gateway.providers.transport import HTTPTransport
from gateway.settings import resolve_secret
from gateway.types import Operation
from tests.gateway.calls import a_call
from tests.gateway.harness import policy_of, tenant
from tests.gateway.providers.scripted_server import ReceivedRequest, ScriptedServer, json_response
from tests.gateway.server.application import Application, running

SIMILARITY = 0.1  # the share of a prompt from which on the server itself prefers the slot that holds it
SYSTEM = " ".join(f"rule-{number}" for number in range(300))


class LlamaServer:
    """Slots that hold the words of their last prompt and answer. Clearing `open` makes calls wait."""

    def __init__(self, slots: int) -> None:
        self.held: list[list[str]] = [[] for _ in range(slots)]
        self.used = [0] * slots
        self.busy = [asyncio.Lock() for _ in range(slots)]
        self.received: list[dict[str, Any]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.arrived = asyncio.Semaphore(0)

    async def script(self, request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        body = json.loads(request.body)
        self.received.append(body)
        self.arrived.release()
        prompt = " ".join(message["content"] for message in body["messages"]).split()
        slot = body.get("id_slot", self.own_choice(prompt))
        async with self.busy[slot]:  # a call for a busy slot waits
            await self.open.wait()
            cached = min(common(self.held[slot], prompt), len(prompt) - 1)
            self.held[slot], self.used[slot] = [*prompt, "fine"], max(self.used) + 1
        usage = {
            "prompt_tokens": len(prompt), "completion_tokens": 1, "total_tokens": len(prompt) + 1,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip
        message = {"role": "assistant", "content": "fine"}
        writer.write(
            json_response(json.dumps({"choices": [{"index": 0, "message": message}], "usage": usage}).encode())
        )

    def own_choice(self, prompt: list[str]) -> int:
        idle = [slot for slot, lock in enumerate(self.busy) if not lock.locked()] or list(range(len(self.busy)))
        best = max(idle, key=lambda slot: common(self.held[slot], prompt))
        if common(self.held[best], prompt) > SIMILARITY * len(prompt):
            return best
        return min(idle, key=lambda slot: self.used[slot])


def common(one: list[str], other: list[str]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def a_deployment(base_url: str = "http://l.invalid/v1", **fields: Any) -> dict[str, Any]:
    return {"name": "l", "provider": "llamacpp", "base_url": base_url, "model": "gguf", **fields}


def policy_for(base_url: str, **fields: Any) -> dict[str, Any]:
    return policy_of(
        deployments=[a_deployment(base_url, **fields)],
        models=[{"name": "m", "deployments": ["l"]}],
        tenants=[tenant()],
    )


class Conversation:
    def __init__(self, name: str) -> None:
        self.messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{name} " * 100}]
        self.lost = 0  # tokens that were in the cache before, and were computed again
        self.cached = 0

    async def take_turn(self, app: Application, **fields: Any) -> None:
        body = {"model": "m", "messages": self.messages, **fields}
        client = await app.ask(json.dumps(body).encode())
        assert client.status == 200, client.content
        usage = client.json["usage"]
        self.lost += max(0, self.cached - usage["prompt_tokens_details"]["cached_tokens"])
        self.cached = usage["prompt_tokens"]
        self.messages += [client.json["choices"][0]["message"], {"role": "user", "content": "and " * 70}]


@pytest.mark.parametrize("slots", [3, None])
async def test_conversations_return_to_their_slots(tmp_path: Path, slots: int | None) -> None:
    llama = LlamaServer(3)
    fields = {} if slots is None else {"slots": slots}
    async with ScriptedServer(llama.script) as server, running(tmp_path, policy_for(server.base_url, **fields)) as app:
        conversations = [Conversation(name) for name in ("amber", "birch", "cedar")]
        for _ in range(4):
            for conversation in conversations:
                await conversation.take_turn(app)
    lost = sum(conversation.lost for conversation in conversations)
    if slots is None:  # the server chooses by similarity, and all conversations begin alike
        assert lost > 500
    else:
        assert lost == 0
        assert [body["id_slot"] for body in llama.received] == [0, 1, 2] * 4


async def test_only_one_call_at_a_time_is_sent_to_a_slot(tmp_path: Path) -> None:
    llama = LlamaServer(2)
    llama.open.clear()
    async with ScriptedServer(llama.script) as server, running(tmp_path, policy_for(server.base_url, slots=2)) as app:
        turns = [asyncio.create_task(Conversation(name).take_turn(app)) for name in ("amber", "birch", "cedar")]
        for _ in range(2):
            await asyncio.wait_for(llama.arrived.acquire(), 10)
        assert sorted(body["id_slot"] for body in llama.received) == [0, 1]
        llama.open.set()
        await asyncio.gather(*turns)
        assert len(llama.received) == 3


async def test_a_slot_is_free_again_after_a_call_that_failed(tmp_path: Path) -> None:
    answered = []

    async def script(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        answered.append(json.loads(request.body)["id_slot"])
        if len(answered) == 1:
            writer.write(json_response(b'{"error": {"message": "no"}}', "400 Bad Request"))
        else:
            await LlamaServer(1).script(request, writer)

    async with ScriptedServer(script) as server, running(tmp_path, policy_for(server.base_url, slots=1)) as app:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x " * 200}]}).encode()
        assert (await app.ask(body)).status == 400
        assert (await app.ask(body)).status == 200
    assert answered == [0, 0]


def rendered(operation: Operation = Operation.CHAT, **fields: Any) -> dict[str, Any]:
    provider = make_provider(Deployment.model_validate(a_deployment()), HTTPTransport(), resolve_secret)
    bodies: dict[Operation, dict[str, Any]] = {
        Operation.CHAT: {"messages": [{"role": "user", "content": "hi"}]},
        Operation.EMBEDDING: {"input": "hi"},
    }
    call = a_call({"model": "m", **bodies[operation], **fields}, operation=operation)
    body: dict[str, Any] = json.loads(provider.render(call))
    return body


async def test_clients_cannot_choose_a_slot() -> None:
    assert rendered(id_slot=1, cache_prompt=False)["cache_prompt"] is True
    assert "id_slot" not in rendered(id_slot=1), "the slot may hold another conversation"
    assert "cache_prompt" not in rendered(Operation.EMBEDDING)


def test_max_concurrency_defaults_to_the_number_of_slots() -> None:
    assert Deployment.model_validate(a_deployment(slots=4)).max_concurrency == 4
    assert Deployment.model_validate(a_deployment(slots=4, max_concurrency=2)).max_concurrency == 2
    with pytest.raises(ValidationError, match=r"max_concurrency: must be at most slots \(4\), not 5"):
        Deployment.model_validate(a_deployment(slots=4, max_concurrency=5))
    with pytest.raises(ValidationError, match="the provider vllm has none"):
        Deployment.model_validate({**a_deployment(slots=4), "provider": "vllm"})
