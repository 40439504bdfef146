"""Send a call where its prefix is warm, unless that server's work would make it wait longer than computing anew.

The cost is one number in predicted seconds, without thresholds and without a switch that drops affinity:

    cost = MISS_WEIGHT * missing / rate  +  queued prefill / rate  +  answers under way / places * LOAD_SECONDS

A miss counts more than its own seconds, because it also evicts and delays what comes later (a weight of 2 to 4 stays
within two points of one pooled cache on recorded traffic). A prefix that every candidate holds distinguishes none of
them, so only what differs weighs.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.fleet import Server
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.routing.base import Candidate
from gateway.types import Call

MISS_WEIGHT = 3.0
LOAD_SECONDS = 0.5  # what a server with all places taken adds to an answer's time, compared with an idle one


class PrefixAffinity:
    def order(self, call: Call, servers: Sequence[Server], now: float) -> list[Candidate]:
        candidates = [self._candidate(call, server) for server in servers]
        return sorted(candidates, key=lambda c: (c.server.cooling(now), c.cost_seconds, c.server.in_flight))

    def _candidate(self, call: Call, server: Server) -> Candidate:
        prompt = call.prompt_tokens_estimate
        matched = min(server.cache.match(call.fingerprint) * BLOCK_TOKENS, prompt)
        rate, in_flight = server.prefill_tokens_per_second, server.in_flight
        miss = MISS_WEIGHT * (prompt - matched) / rate
        queued = server.prefill_tokens_queued / rate
        load = LOAD_SECONDS * in_flight / server.deployment.max_concurrency
        return Candidate(server, miss + queued + load, prompt, matched, server.prefill_tokens_queued, in_flight)
