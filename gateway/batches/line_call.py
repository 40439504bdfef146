"""Runs one line of a batch as a call: the same phases of `gateway.serve`, without a socket.

Three of the gateway's components are replaced for a line:

* The authenticator identifies the client by the id of the key that created the batch, because the secret is not stored.
* The canonicaliser always uses the latency class `batches.latency_class` of the policy and ignores the policy's rules.
* The call log keeps the receipt, which is then stored in one step with the line's result. Otherwise a killed gateway
  could have billed a line whose answer is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn

import msgspec
from starlette.types import Message

from gateway.auth.key_ids import KEY_ID_HEADER
from gateway.billing.ledger import OpenCall
from gateway.billing.open_calls import CallLog
from gateway.endpoints.base import Endpoint
from gateway.endpoints.wire import WIRE, Wire
from gateway.policy import LatencyClass, Policy
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.serve import Components, handle
from gateway.types import Call, Receipt


class BatchCanonicaliser(Canonicaliser):
    """Gives every call the latency class of batches, with a queue wait limit as long as the call's own limit.

    No client waits for the answer, so waiting in the queue is always better than failing.
    """

    # The policy's latency class, and the copy of it with a longer `max_wait`.
    _patient: tuple[LatencyClass, LatencyClass] | None = None

    def canonicalise(self, *given: Any, policy: Policy, now: float, **named: Any) -> Call:
        call = super().canonicalise(*given, policy=policy, now=now, **named)
        name = policy.batches.latency_class
        known = policy.classes[name]
        if self._patient is None or self._patient[0] is not known:  # a policy reload creates new objects
            self._patient = (known, known.model_copy(update={"max_wait": known.total}))
        limits = self._patient[1]
        return msgspec.structs.replace(
            call, class_name=name, latency_class=limits, class_rule=None, deadline=now + limits.total
        )


class DeferredCallLog:
    """Call log of one line. Keeps the receipt, and passes everything else to the real call log."""

    writes_at_once: ClassVar[bool] = False

    def __init__(self, call_log: CallLog) -> None:
        self._call_log = call_log
        self.receipt: Receipt | None = None

    def check(self) -> None:
        self._call_log.check()

    def open_call(self, opened: OpenCall) -> None:
        """Open the call with the flag `held`: crash recovery bills the call only if its receipt was written."""
        self._call_log.open_call(msgspec.structs.replace(opened, held=True))

    def append(self, receipt: Receipt) -> None:
        self.receipt = receipt

    def abandon(self, call_id: str) -> None:
        self._call_log.abandon(call_id)


@dataclass
class LineReply:
    """The client's side of a line's call: implements `Wire`, and collects the reply and the receipt.

    The receipt is set even if the call was cancelled.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    receipt: Receipt | None = None

    def whole_body(self) -> bytes | None:
        """Return None, because `receive` returns the request body."""
        return None

    def begin(self, status: int, lines: bytes, *, length: int | None, close: bool) -> bool:
        self.status = status
        pairs = (line.partition(": ") for line in lines.decode("latin-1").splitlines())
        self.headers = {name: value for name, _, value in pairs}
        return True

    def write(self, chunk: bytes, last: bool) -> bool:
        self.body += chunk
        return True

    def coded_writer(self) -> None:
        """Return None, because there is no transfer coding."""

    def when_gone(self, tell: Callable[[], None] | None) -> None:
        """Do nothing, because this client never disconnects."""


async def call_line(
    components: Components, endpoint: Endpoint, body: bytes, reply: LineReply, *, key_id: str, call_id: str
) -> None:
    """Run one request through all phases, and fill `reply`. If cancelled, it releases its slots and reservations."""
    wire: Wire = reply
    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/v1/{endpoint.path}",
        "headers": [(b"content-type", b"application/json"), (KEY_ID_HEADER, key_id.encode())],
        "extensions": {WIRE: wire},
    }

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    call_log = DeferredCallLog(components.call_log)
    try:
        await handle(replace(components, call_log=call_log), endpoint, scope, receive, _never_send, call_id=call_id)
    finally:
        reply.receipt = call_log.receipt


async def _never_send(message: Message) -> NoReturn:
    raise AssertionError(f"the wire accepts everything, but {message['type']} was sent beside it")
