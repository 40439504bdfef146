"""The strategies by operation: what can reuse a prefix goes where it is warm, the rest where there is room."""

from gateway.routing.base import Strategy
from gateway.routing.least_busy import LeastBusy
from gateway.routing.prefix_affinity import PrefixAffinity
from gateway.types import Operation

STRATEGIES: dict[Operation, Strategy] = {
    Operation.CHAT: PrefixAffinity(),
    Operation.COMPLETION: PrefixAffinity(),
    Operation.EMBEDDING: LeastBusy(),
}

__all__ = ["STRATEGIES"]
