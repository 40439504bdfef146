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
        work = (server.prefill_tokens_queued + call.prompt_tokens_estimate) / server.prefill_tokens_per_second
        taken = server.in_flight / server.deployment.max_concurrency
        return Candidate(
            server, work + taken, 0, f"{server.in_flight} of {server.deployment.max_concurrency} places taken"
        )
