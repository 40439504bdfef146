"""Routing, phase 6: chooses a deployment for each call, and retries, hedges or resumes it if that deployment fails.

It may import `deployments`, `prefix`, `providers`, `policy`, `types` and `core`. Begin at `router.py`. `base.py` is the
port of the strategies; `STRATEGIES` lists them by policy name and operation. Embeddings and passed
requests have no prefix to reuse, so they always go to the least busy deployment, except under `round_robin`.
"""

from gateway.routing.base import ServingStrategy
from gateway.routing.least_busy import LeastBusy
from gateway.routing.prefix_affinity import PrefixAffinity
from gateway.routing.round_robin import RoundRobin
from gateway.types import Operation

STRATEGIES: dict[str, dict[Operation, ServingStrategy]] = {
    "prefix_affinity": {
        Operation.CHAT: PrefixAffinity(),
        Operation.COMPLETION: PrefixAffinity(),
        Operation.EMBEDDING: LeastBusy(),
        Operation.PASSED: LeastBusy(),
    },
    "least_busy": dict.fromkeys(Operation, LeastBusy()),
    "round_robin": dict.fromkeys(Operation, RoundRobin()),
}

__all__ = ["STRATEGIES"]
