"""Real gateway components around scripted deployments, and a client at the ASGI border.

Storage, limits, queue, router, cache and ledger are the shipped ones; only the deployments are scripted. `Client`
checks that the gateway keeps to the ASGI protocol, and behaves as uvicorn does: it reports the end of a reply as a
disconnect.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from gateway.auth.authenticator import Authenticator
from gateway.background import BackgroundCanonicaliser, BackgroundService
from gateway.billing.ledger.chain import segments
from gateway.billing.ledger.rows import complete_receipt
from gateway.billing.open_calls import LedgerCallLog
from gateway.billing.recovery import CrashRecovery
from gateway.billing.settler import Settler
from gateway.billing.unbilled import UnbilledAttempt
from gateway.core.api_keys import hash_key
from gateway.deployments.fleet import Fleet
from gateway.diagnosis import DiagnosisJournal, PrefixDiagnosis
from gateway.endpoints import ENDPOINTS
from gateway.endpoints.request_body import BodyBudget
from gateway.hooks.runner import HookRunner
from gateway.idempotency import Idempotency
from gateway.limits import LIMITS
from gateway.limits.limiter import Limiter
from gateway.mirroring import Mirroring
from gateway.policy.file import PolicyHolder
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.providers.base import Fault, ProviderFailure
from gateway.queueing import Queue
from gateway.response_cache import ResponseCache
from gateway.response_store import ResponseStore
from gateway.routing import STRATEGIES
from gateway.routing.router import Router
from gateway.serve import Components, handle, serve
from gateway.types import Call, Operation
from tests.gateway.doubles import CountingStorage, FaultyLedger, RecordingTelemetry, ScriptedProvider, ScriptedResponse

KEY = "wp-dev-0123456789abcdef"
PEPPER = "pepper"
MAX_BODY_BYTES = 10_000
PATIENCE_SECONDS = 10.0  # a test that hangs fails after this
DONE = b"data: [DONE]\n\n"


def policy_of(**changes: Any) -> dict[str, Any]:
    """One model on the deployments a and b, with c as fallback; one tenant, whose key is KEY."""
    price = {"input": "1", "output": "2"}
    deployments = [
        {"name": name, "base_url": f"http://{name}.invalid/v1", "model": f"served-by-{name}", "max_concurrency": 2}
        for name in ("a", "b", "c")
    ]
    return {
        "deployments": [{**deployment, "price": price} for deployment in deployments],
        "models": [
            {"name": "m", "deployments": ["a", "b"], "fallbacks": ["other"]},
            {"name": "other", "deployments": ["c"]},
        ],
        "rules": [{"match": {"service_tier": "flex"}, "class": "batch"}],
        "tenants": [tenant()],
        **changes,
    }


def tenant(**limits: Any) -> dict[str, Any]:
    known = {"id": "dev", "hash": hash_key(KEY, PEPPER)}
    return {"name": "t", "keys": [known], **({"limits": limits} if limits else {})}


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}).encode()


def delta(text: str, **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}], **more}).encode() + b"\n\n"


def usage_frame(prompt: int = 10, output: int = 2) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": counted(prompt, output)}).encode() + b"\n\n"


def counted(prompt: int = 10, output: int = 2) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def answer(text: str = "hi", **more: Any) -> bytes:
    message = {"role": "assistant", "content": text}
    return json.dumps({"choices": [{"index": 0, "message": message}], "usage": counted(), **more}).encode()


class Client:
    """A client at the ASGI border: one request, and its reply as it arrives."""

    def __init__(
        self,
        body: bytes | Sequence[bytes | None] = b"",  # None: the rest never arrives
        *,
        key: str = KEY,
        method: str = "POST",
        path: str = "/v1/chat/completions",
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        self.scope = {
            "type": "http", "method": method, "path": path, "query_string": b"", "http_version": "1.1",
            "headers": [(b"authorization", f"Bearer {key}".encode()), *headers],
        }  # fmt: skip
        self.status = 0
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []
        self.whole = False  # the reply is complete
        self.gone = False
        self.first_bytes = asyncio.Event()
        self.takes: asyncio.Event | None = None  # if given, the client reads nothing until it is set
        self.on_last: Callable[[], None] = lambda: None
        self._body: list[bytes | None] = [body] if isinstance(body, bytes) else list(body)
        self._over = asyncio.Event()

    @property
    def content(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    def leave(self) -> None:
        self.gone = True
        self._over.set()
        if self.takes is not None:
            self.takes.set()  # a waiting `send` sees the disconnect

    async def receive(self) -> dict[str, Any]:
        if self._body and not self.gone:
            chunk = self._body.pop(0)
            if chunk is not None:
                return {"type": "http.request", "body": chunk, "more_body": bool(self._body)}
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.takes is not None:
            await self.takes.wait()
        if self.gone:
            return
        if not self.status:
            assert message["type"] == "http.response.start", message
            self.status = message["status"]
            pairs = [(name.decode(), value.decode()) for name, value in message["headers"]]
            self.headers = dict(pairs)
            assert len(self.headers) == len(pairs), "a header is repeated"
            return
        assert message["type"] == "http.response.body" and not self.whole, message
        self.chunks.append(message.get("body", b""))
        self.first_bytes.set()
        if not message.get("more_body", False):
            self.on_last()
            self.whole = True
            assert int(self.headers.get("content-length", len(self.content))) == len(self.content)
            self._over.set()


class Rig:
    """Real components around scripted deployments, and what a test can observe of them afterwards."""

    def __init__(self, directory: Path, policy: dict[str, Any]) -> None:
        self.servers = {name: ScriptedProvider() for name in ("a", "b", "c")}
        self.storage = CountingStorage()
        self.telemetry = RecordingTelemetry()
        self.policy_file = directory / "policy.yaml"
        self.write_policy(policy)
        self.fleet = Fleet(lambda deployment: self.servers[deployment.name])
        self.ledger = FaultyLedger(directory / "ledger", "r")
        self.ledger_directory = directory / "ledger" / "r"
        limiter = Limiter(self.storage, LIMITS)
        bodies = BodyBudget(100 * MAX_BODY_BYTES)
        self.response_store = ResponseStore(self.storage, bodies)
        self.idempotency = Idempotency(self.storage)
        self.components = Components(
            policies=PolicyHolder(self.policy_file),
            authenticator=Authenticator(self.storage, PEPPER),
            canonicaliser=Canonicaliser(b"secret", response_store=self.response_store),
            cache=ResponseCache(self.storage),
            limiter=limiter,
            queue=Queue(self.fleet),
            router=Router(self.fleet, STRATEGIES),
            call_log=LedgerCallLog(self.ledger, on_unbilled=self._on_unbilled),
            settler=Settler(limiter, self.ledger),
            telemetry=self.telemetry,
            diagnosis=PrefixDiagnosis(DiagnosisJournal(directory / "diagnosis", "r")),
            mirroring=Mirroring(self.fleet),
            hooks=HookRunner(),
            max_body_bytes=MAX_BODY_BYTES,
            bodies=bodies,
        )
        self.background = self.another_background()
        self.recovery = CrashRecovery(
            self.ledger,
            self.fleet,
            self.components.policies,
            limiter,
            self.components.authenticator,
            owner="r",
            lookup_seconds=0.0,
        )
        self.fleet.apply(self.components.policies.current)
        self.components.policies.subscribe(self.fleet.apply)

    def _on_unbilled(self, attempt: UnbilledAttempt) -> None:
        self.recovery.add_unbilled(attempt)

    def another_background(self) -> BackgroundService:
        """What runs responses in the background, here or at another gateway on the same storage."""
        canonicaliser = BackgroundCanonicaliser(b"secret", response_store=self.response_store)
        return BackgroundService(self.storage, self.response_store, self.components.policies, canonicaliser)

    def write_policy(self, policy: dict[str, Any]) -> None:
        self.policy_file.write_text(yaml.safe_dump(policy))

    @property
    def replies(self) -> list[ScriptedResponse]:
        """The responses of all deployments, in the order in which they were opened."""
        return [reply for server in self.servers.values() for reply in server.replies]

    @property
    def last_call(self) -> Call:
        """The call that was sent upstream last."""
        return max(self.replies, key=lambda reply: reply.number).call

    def begin(self, client: Client, replica: Idempotency | None = None) -> asyncio.Task[None]:
        """Begin a request. `replica` stands for another gateway on the same storage."""
        path = client.scope["path"]
        endpoint = next(endpoint for endpoint in ENDPOINTS if path == f"/v1/{endpoint.path}")
        run = self.background.accept(serve) if path == "/v1/responses" else serve
        story = (replica or self.idempotency).once(run)
        served = handle(self.components, endpoint, client.scope, client.receive, client.send, story=story)
        return asyncio.create_task(served)

    async def ask(self, body: bytes | Client, operation: Operation = Operation.CHAT) -> Client:
        """Run one request to its end. The deployments must have a script."""
        client = body if isinstance(body, Client) else Client(body, path=f"/v1/{operation.value}")
        await in_time(self.begin(client))
        return client

    def script(self, *words: bytes | Exception | None) -> None:
        for server in self.servers.values():
            server.script = words

    async def reply(self, number: int = 0) -> ScriptedResponse:
        """The response that was opened as the `number`th, from 0 on."""
        for _ in range(100):
            if len(self.replies) > number:
                return self.replies[number]
            await asyncio.sleep(0)
        raise AssertionError("no deployment got a request")

    def rows(self) -> list[dict[str, Any]]:
        rows = b"".join(file.read_bytes() for file in segments(self.ledger_directory)).splitlines()
        return [json.loads(row) for row in rows]

    def receipts(self) -> list[dict[str, Any]]:
        return [complete_receipt(row) for row in self.rows() if row["kind"] == "receipt"]

    async def check_at_rest(self) -> None:
        """Assert that no component holds anything any more, and that everything ended exactly once."""
        await self.components.settler.stop()
        await self.recovery.catch_up()
        await self.components.limiter.retry_unsettled()
        await settle()
        for server in self.fleet:
            held = (server.slots_taken, server.in_flight, server.estimate.queue.tokens)
            assert held == (0, 0, 0), server.name
        assert all(reply.closed for reply in self.replies), "a connection is left open"
        assert self.components.cache.in_flight == 0, "a recording was never ended"
        assert self.components.limiter.open_reservations == 0
        assert self.components.bodies.held_bytes == 0, "memory for bodies was not released"
        assert sorted(self.storage.ended) == sorted(self.storage.granted), "each reservation ends exactly once"
        assert self.ledger.open_call_count == 0 or self.ledger.has_failed, "an open call was never closed"
        calls = [receipt["call_id"] for receipt in self.receipts()]
        assert len(set(calls)) == len(calls), "a call has two receipts"
        ours = {task for task in asyncio.all_tasks() if "ledger" not in task.get_name()}
        assert ours == {asyncio.current_task()}, "a task is left behind"


@asynccontextmanager
async def a_rig(directory: Path, **changes: Any) -> AsyncIterator[Rig]:
    """A rig with its ledger open. At the end, nothing may be held (`check_at_rest`)."""
    rig = Rig(directory, policy_of(**changes))
    async with rig.ledger:
        yield rig
        await rig.check_at_rest()


async def in_time(awaitable: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaitable, PATIENCE_SECONDS)


async def settle() -> None:
    """Run every task until it waits for something else."""
    for _ in range(30):
        await asyncio.sleep(0)


def cut(message: str = "cut") -> ProviderFailure:
    return ProviderFailure(Fault.CUT, message)


def last_event(client: Client) -> Any:
    return json.loads(client.content.removesuffix(b"\n\n").rpartition(b"data: ")[2])


def outcomes(rig: Rig) -> list[str]:
    return [receipt["outcome"] for receipt in rig.receipts()]
