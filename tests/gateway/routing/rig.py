"""A router over scripted deployments."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from gateway.core.errors import GatewayError
from gateway.deployments.fleet import Fleet
from gateway.deployments.state import DeploymentState
from gateway.policy import Policy
from gateway.providers.base import Fault, ProviderFailure, UpstreamResponse
from gateway.queueing import Queue
from gateway.routing import STRATEGIES
from gateway.routing.attempt_log import AttemptLog
from gateway.routing.router import Router
from gateway.types import Call
from tests.gateway.calls import a_call, a_policy, chat
from tests.gateway.silent_provider import SilentProvider

Step = bytes | ProviderFailure | asyncio.Event
TEXT = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
DONE = b"data: [DONE]\n\n"


class Script(SilentProvider):
    """A provider that answers by a script. Bytes are chunks, failures are raised, and the answer waits for events."""

    def __init__(self, *steps: Step, opener: ProviderFailure | asyncio.Event | None = None) -> None:
        self.steps = steps
        self.opener = opener
        self.closed = 0
        self.opened = 0
        self.refusal: ProviderFailure | None = None
        self.headers: Mapping[str, str] = {}

    def unsupported_error(self, call: Call) -> ProviderFailure | None:
        return self.refusal

    async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
        self.opened += 1
        self.headers = headers
        if isinstance(self.opener, ProviderFailure):
            raise self.opener
        if self.opener is not None:
            await self.opener.wait()
        return ScriptedResponse(self)


class ScriptedResponse(UpstreamResponse):
    def __init__(self, script: Script) -> None:
        self._script = script
        self._steps = iter(script.steps)

    async def __anext__(self) -> bytes:
        for step in self._steps:
            if isinstance(step, ProviderFailure):
                raise step
            if isinstance(step, bytes):
                return step
            await step.wait()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._script.closed += 1


class ScriptSequence(Script):
    """Runs one script per request, and repeats the last one."""

    def __init__(self, *turns: Script) -> None:
        super().__init__()
        self.turns = list(turns)

    async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
        self.opened += 1
        turn = self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]
        return await turn.open(call, headers=headers, body=body)


def sink_into(chunks: list[bytes]) -> Callable[..., bool]:
    """A sink, or a text sink, that accepts every chunk and adds it to `chunks`."""

    def sink(chunk: bytes, events: int = 1) -> bool:
        chunks.append(chunk)
        return True

    return sink


class Rig:
    """A router over scripted deployments; `chunks` opens a call and reads it."""

    def __init__(self, policy: Policy | None = None, **scripts: Script) -> None:
        self.policy = policy or a_policy()
        self.scripts: dict[str, Any] = scripts
        self.fleet = Fleet(lambda deployment: scripts[deployment.name])
        self.queue = Queue(self.fleet)
        self.fleet.apply(self.policy)
        self.router = Router(self.fleet, STRATEGIES)
        self._span_ids = itertools.count(1)
        self.attempts = self.new_attempts()

    def new_attempts(self) -> AttemptLog:
        return AttemptLog(lambda: next(self._span_ids), lambda span: {"traceparent": f"span-{span}"})

    async def chunks(self, attempts: AttemptLog | None = None, *, tenant: str = "t", **fields: object) -> list[bytes]:
        body = chat(stream=True) | fields
        call = a_call(body, self.policy, tenant=tenant, now=asyncio.get_running_loop().time())
        tried = self.attempts if attempts is None else attempts
        with await self.queue.acquire_slot(call) as permit:
            async with self.router.open(call, permit, tried) as upstream:
                chunks = [await upstream.first()]
                assert await upstream.stream_to(sink_into(chunks))
                upstream.completed()
                return chunks

    @property
    def outcomes(self) -> list[tuple[str, str]]:
        return [(attempt.deployment, attempt.outcome) for attempt in self.attempts.done]

    def idle(self) -> bool:
        return not any(s.slots_taken or s.in_flight or s.estimate.queue.tokens for s in self.fleet)


def status(code: int, fault: Fault = Fault.STATUS) -> ProviderFailure:
    return ProviderFailure(fault, f"status {code}", status=code, body=b'{"error": {}}')


def busy(code: int, seconds: float | None) -> ProviderFailure:
    return ProviderFailure(Fault.STATUS, f"status {code}", status=code, retry_after_seconds=seconds)


def one_deployment(**realtime: object) -> Policy:
    return a_policy(
        deployments=[{"name": "a", "base_url": "http://a.invalid/v1", "model": "m"}],
        models=[{"name": "m", "deployments": ["a"]}],
        classes={"realtime": realtime},
    )


def two_deployments(**realtime: object) -> Policy:
    return a_policy(
        deployments=[{"name": name, "base_url": f"http://{name}.invalid/v1", "model": "m"} for name in "ab"],
        models=[{"name": "m", "deployments": ["a", "b"]}],
        classes={"realtime": realtime},
    )


def deployment_named(rig: Rig, name: str) -> DeploymentState:
    return next(deployment_named for deployment_named in rig.fleet if deployment_named.name == name)


async def failing(rig: Rig, **fields: Any) -> GatewayError:
    with pytest.raises(GatewayError) as failure:
        await rig.chunks(**fields)
    assert rig.idle()
    return failure.value
