"""The strategies by their name in the policy and by operation: what has no prefix to reuse goes where there is room."""

from gateway.routing.base import Strategy
from gateway.routing.least_busy import LeastBusy
from gateway.routing.prefix_affinity import PrefixAffinity
from gateway.routing.round_robin import RoundRobin
from gateway.types import Operation

STRATEGIES: dict[str, dict[Operation, Strategy]] = {
    "prefix_affinity": {
        Operation.CHAT: PrefixAffinity(),
        Operation.COMPLETION: PrefixAffinity(),
        Operation.EMBEDDING: LeastBusy(),
    },
    "least_busy": dict.fromkeys(Operation, LeastBusy()),
    "round_robin": dict.fromkeys(Operation, RoundRobin()),
}

__all__ = ["STRATEGIES"]
