"""Gives the calls of responses in the background their time bounds: no client waits for them."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.core.deadlines import TIMEOUT_HEADERS
from gateway.policy import LatencyClass, Policy
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.types import Call, Principal

# Headers that belong to the client's request and not to its run.
RUN_HEADERS_DROPPED = frozenset(
    {*TIMEOUT_HEADERS, b"idempotency-key", b"content-length", b"transfer-encoding", b"expect"}
)
CLASSES_MAX = 1000  # that are remembered


class BackgroundCanonicaliser(Canonicaliser):
    """Lets a call take `background.max_time`, also in the queue, whatever its latency class says."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        # The policy's classes, each with its copy, by the class's identity and the bound in seconds.
        self._patient: dict[tuple[int, float], tuple[LatencyClass, LatencyClass]] = {}

    def canonicalise(self, *given: Any, principal: Principal, policy: Policy, now: float, **named: Any) -> Call:
        call = super().canonicalise(*given, principal=principal, policy=policy, now=now, **named)
        seconds = policy.responses_of(principal.tenant).background.max_time
        limits = self._limits(call.latency_class, seconds)
        return msgspec.structs.replace(call, latency_class=limits, deadline=now + seconds)

    def _limits(self, known: LatencyClass, seconds: float) -> LatencyClass:
        """The class with these bounds. The same object as long as the policy is the same."""
        found = self._patient.get((id(known), seconds))
        if found is None or found[0] is not known:
            if len(self._patient) >= CLASSES_MAX:
                self._patient.clear()
            found = known, known.model_copy(update={"max_wait": seconds, "total": seconds})
            self._patient[id(known), seconds] = found
        return found[1]
