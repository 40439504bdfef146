"""A line's call: the very story of `gateway.serve`, without a socket.

Three parts of the house are others for it. The key that created the batch stands for the client, whose secret is not
kept. The class is the policy's for batches, whatever its rules say. And the receipt is held back, to be recorded with
the line's result in one step: a killed gateway must not have billed a line whose answer it has lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import msgspec
from starlette.types import Message

from gateway.auth.authenticator import Authenticator
from gateway.billing.ledger import OpenCall
from gateway.billing.open_calls import CallLog
from gateway.core.errors import Unauthenticated
from gateway.endpoints.base import Endpoint
from gateway.endpoints.exchange import WIRE, Wire
from gateway.policy import LatencyClass, Policy
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.serve import Components, handle
from gateway.types import Call, Principal, Receipt

KEY_HEADER = b"batch-key"  # the id of a key; only in requests that are made here


class KeyById(Authenticator):
    """Finds the key that a batch was created with, as it is now: one that was revoked meanwhile is refused."""

    async def authenticate(self, headers: Mapping[bytes, bytes], policy: Policy) -> Principal:
        principal = await self.principal_of(headers[KEY_HEADER].decode(), policy)
        if principal is None:
            raise Unauthenticated("the API key that created the batch is not valid any more")
        return principal


class AtBatchClass(Canonicaliser):
    """Every call is of the batches' latency class, and waits for its turn as long as it may last at all: nobody is
    there who could do something better than wait."""

    _patient: tuple[LatencyClass, LatencyClass] | None = None  # the policy's class, and what is made of it here

    def canonicalise(self, *given: Any, policy: Policy, now: float, **named: Any) -> Call:
        call = super().canonicalise(*given, policy=policy, now=now, **named)
        name = policy.batches.latency_class
        known = policy.classes[name]
        if self._patient is None or self._patient[0] is not known:
            self._patient = (known, known.model_copy(update={"max_wait": known.total}))
        limits = self._patient[1]
        return msgspec.structs.replace(
            call, class_name=name, latency_class=limits, class_rule=None, deadline=now + limits.total
        )


class Held:
    """The books of one line: the receipt waits here."""

    def __init__(self, call_log: CallLog) -> None:
        self._call_log = call_log
        self.receipt: Receipt | None = None

    def check(self) -> None:
        self._call_log.check()

    def open_call(self, opened: OpenCall) -> None:
        """Nobody is billed for what is opened here, unless the receipt closes it."""
        self._call_log.open_call(msgspec.structs.replace(opened, held=True))

    def append(self, receipt: Receipt) -> None:
        self.receipt = receipt

    def abandon(self, call_id: str) -> None:
        self._call_log.abandon(call_id)


@dataclass
class Reply:
    """The far end of the gateway's `Wire`, and what came there; the receipt also of a call that was cancelled."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    receipt: Receipt | None = None

    def whole_body(self) -> bytes | None:
        """It is received, as any."""
        return None

    def begin(self, status: int, lines: bytes, *, length: int | None, close: bool) -> bool:
        self.status = status
        pairs = (line.partition(": ") for line in lines.decode("latin-1").splitlines())
        self.headers = {name: value for name, _, value in pairs}
        return True

    def write(self, chunk: bytes, last: bool) -> bool:
        self.body += chunk
        return True

    def when_gone(self, tell: Callable[[], None] | None) -> None:
        """It does not leave."""


async def call(
    components: Components, endpoint: Endpoint, body: bytes, reply: Reply, *, key_id: str, call_id: str
) -> None:
    """One request from its beginning to its end. Cancelled, it gives back what it held, as any call."""
    wire: Wire = reply
    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/v1/{endpoint.path}",
        "headers": [(b"content-type", b"application/json"), (KEY_HEADER, key_id.encode())],
        "extensions": {WIRE: wire},
    }

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    held = Held(components.call_log)
    try:
        await handle(replace(components, call_log=held), endpoint, scope, receive, _never, call_id=call_id)
    finally:
        reply.receipt = held.receipt


async def _never(message: Message) -> NoReturn:
    raise AssertionError(f"the wire takes everything, and {message['type']} was sent beside it")
