"""Send a call to the server with the smallest share of its places taken. For calls without a prefix to reuse."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.fleet import Server
from gateway.routing.base import Candidate
from gateway.types import Call


class LeastBusy:
    def order(self, call: Call, servers: Sequence[Server], now: float) -> list[Candidate]:
        candidates = [self._candidate(call, server) for server in servers]
        return sorted(candidates, key=lambda c: (c.server.cooling(now), c.cost_seconds))

    def _candidate(self, call: Call, server: Server) -> Candidate:
        prompt, queued = call.prompt_tokens_estimate, server.prefill_tokens_queued
        taken = server.in_flight / server.deployment.max_concurrency
        cost_seconds = (queued + prompt) / server.prefill_tokens_per_second + taken
        return Candidate(server, cost_seconds, prompt, 0, queued, server.in_flight)
