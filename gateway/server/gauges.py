"""Registers the gauges of each component. Their values are read when /metrics is scraped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.batches import BatchService
from gateway.billing.drift_monitor import DriftMonitor
from gateway.billing.ledger import Ledger
from gateway.billing.settler import Settler
from gateway.core.supervision import Supervisor
from gateway.deployments.circuit_breaker import STATES
from gateway.deployments.engine_reports import EngineReports
from gateway.deployments.fleet import Fleet
from gateway.deployments.replica_sync import PeerReports
from gateway.discovery.discovery import Discovery
from gateway.hooks.runner import HookRunner
from gateway.idempotency import Idempotency
from gateway.limits.budget_warnings import BudgetWarnings
from gateway.limits.limiter import Limiter
from gateway.limits.outage_fallback import OutageFallback
from gateway.mirroring import Mirroring
from gateway.policy.file import PolicyHolder
from gateway.response_store import ResponseStore
from gateway.serve import Components
from gateway.telemetry.observable import (
    BATCH_LINES,
    BATCHES,
    BATCHES_ENDED,
    BODIES,
    BUDGET_FORECAST,
    BUDGET_LEFT,
    BUDGET_SPENT,
    CUT_STREAMS,
    DEPLOYMENT_AVAILABLE,
    DEPLOYMENT_BREAKER,
    DEPLOYMENT_INFLIGHT,
    DEPLOYMENT_REPORTED,
    DISCOVERY_CHANGES,
    DISCOVERY_FAILURES,
    DISCOVERY_INSTANCES,
    DISCOVERY_UP,
    HOOK_RUNS,
    IDEMPOTENCY,
    INFLIGHT,
    KV_BLOCKS,
    KV_CALLS,
    KV_EVENT_BATCHES,
    LEDGER_COUNTED,
    LEDGER_DRIFT,
    LEDGER_LAG,
    LEDGER_OK,
    LEDGER_ROWS,
    LIMITS_LOCAL,
    LIMITS_LOCAL_CALLS,
    LIMITS_LOST,
    LIMITS_STORAGE_FAILURES,
    LIMITS_UNREPORTED,
    LIMITS_UNSETTLED,
    MIRROR_DIFFERENT,
    MIRROR_SECONDS,
    MIRROR_TOKENS,
    MIRROR_TTFT,
    MIRRORED,
    PEER_CALLS_LEARNED,
    PEER_GATEWAYS,
    POLICY_FILE_OK,
    QUEUE_DEPTH,
    QUEUE_OLDEST,
    QUEUE_SHED,
    RESPONSES_STORED,
    SPEND_PACE,
    TASK_FAILURES,
    TASKS_DOWN,
    USAGE_IMPLAUSIBLE,
    WEBHOOKS,
    ObservableMetric,
    Reading,
)

if TYPE_CHECKING:
    from gateway.billing.ledger.shipper import Shipper

Register = Callable[[ObservableMetric, Callable[[], Reading]], None]


def show_calls(
    register: Register, components: Components, policies: PolicyHolder, in_flight: Callable[[], int]
) -> None:
    register(POLICY_FILE_OK, lambda: float(policies.last_error is None))
    register(INFLIGHT, in_flight)
    register(BODIES, lambda: components.bodies.held_bytes)
    queued = components.queue.scheduler
    register(QUEUE_DEPTH, lambda: {(name,): queued.depth(name) for name in policies.current.classes})
    register(QUEUE_OLDEST, lambda: {(name,): queued.oldest_seconds(name, _now()) for name in policies.current.classes})
    register(QUEUE_SHED, lambda: {(name,): queued.shed[name] for name in policies.current.classes})
    register(CUT_STREAMS, lambda: {(result,): count for result, count in components.router.cut_streams.items()})


def show_deployments(register: Register, fleet: Fleet) -> None:
    register(
        DEPLOYMENT_BREAKER,
        lambda: {
            (deployment.name, state): float(deployment.breaker.state(_now()) == state)
            for deployment in fleet
            for state in STATES
        },
    )
    register(
        USAGE_IMPLAUSIBLE,
        lambda: {(deployment.name,): deployment.failures.implausible_usages for deployment in fleet},
    )
    register(DEPLOYMENT_INFLIGHT, lambda: {(deployment.name,): deployment.in_flight for deployment in fleet})
    register(
        DEPLOYMENT_AVAILABLE,
        lambda: {(deployment.name,): float(not deployment.is_deprioritised(_now())) for deployment in fleet},
    )


def show_discovery(register: Register, discovery: Discovery) -> None:
    register(DISCOVERY_INSTANCES, lambda: {(one.template.name,): one.instances for one in discovery})
    register(
        DISCOVERY_UP, lambda: {(one.template.name,): float(one.has_list and one.error is None) for one in discovery}
    )
    register(DISCOVERY_CHANGES, lambda: {(one.template.name,): one.changes for one in discovery})
    register(DISCOVERY_FAILURES, lambda: {(one.template.name,): one.failures for one in discovery})


def show_reports(register: Register, fleet: Fleet, reports: EngineReports) -> None:
    """Register the metrics of what engines report about themselves: KV events and load."""
    register(
        KV_EVENT_BATCHES,
        lambda: {
            (deployment.name, kind): getattr(reporter.counts, kind)
            for deployment, reporter in reports
            if deployment.blocks is not None
            for kind in ("batches", "gaps", "malformed")
        },
    )
    register(
        KV_BLOCKS,
        lambda: {(deployment.name,): len(deployment.blocks) for deployment in fleet if deployment.blocks is not None},
    )
    register(
        KV_CALLS,
        lambda: {
            (deployment.name, known): count
            for deployment in fleet
            if (blocks := deployment.blocks) is not None
            for known, count in (
                ("known", blocks.calls_attributed), ("unknown", blocks.calls_finished - blocks.calls_attributed)
            )
        },
    )  # fmt: skip
    register(
        DEPLOYMENT_REPORTED,
        lambda: {
            (deployment.name, what): getattr(load, what)
            for deployment in fleet
            if (load := deployment.estimate.load) is not None
            for what in ("running", "waiting", "kv_usage")
        },
    )


def show_sharing(register: Register, peers: PeerReports) -> None:
    register(PEER_GATEWAYS, lambda: peers.live_peers)
    register(PEER_CALLS_LEARNED, lambda: peers.calls_received)


def show_tasks(register: Register, supervisor: Supervisor) -> None:
    """Register the metrics of background tasks."""
    register(TASK_FAILURES, lambda: {(name,): count for name, count in supervisor.failures.items()})
    register(TASKS_DOWN, lambda: {(name,): float(name in supervisor.down()) for name in supervisor.failures})


def show_limits(register: Register, limiter: Limiter, counters: OutageFallback, settler: Settler) -> None:
    register(
        LIMITS_LOST,
        lambda: {
            ("lease",): limiter.leases_lost,
            ("settlement",): limiter.settlements_dropped + settler.failed,
        },
    )
    register(LIMITS_UNSETTLED, lambda: limiter.unsettled)
    register(LIMITS_STORAGE_FAILURES, lambda: limiter.storage_failures)
    register(LIMITS_LOCAL, lambda: float(counters.in_outage))
    register(
        LIMITS_LOCAL_CALLS, lambda: {("granted",): counters.granted_locally, ("refused",): counters.rejected_locally}
    )
    register(LIMITS_UNREPORTED, lambda: counters.unreported)


def show_ledger(register: Register, ledger: Ledger, drift_monitor: DriftMonitor, shipper: Shipper | None) -> None:
    register(LEDGER_ROWS, lambda: ledger.receipts_written)
    register(LEDGER_DRIFT, lambda: drift_monitor.drift)
    register(LEDGER_COUNTED, lambda: drift_monitor.counted)
    register(LEDGER_OK, lambda: float(ledger.ok))
    register(
        LEDGER_LAG,
        lambda: {
            ("durable",): ledger.lag_seconds,
            **({} if shipper is None else {("shipped",): shipper.lag_seconds}),
        },
    )


def show_budgets(register: Register, warnings: BudgetWarnings) -> None:
    register(BUDGET_SPENT, lambda: warnings.spent)
    register(BUDGET_LEFT, lambda: warnings.left)
    register(BUDGET_FORECAST, lambda: warnings.forecast)
    register(SPEND_PACE, lambda: warnings.pace)
    register(WEBHOOKS, lambda: {("sent",): warnings.sent, ("dropped",): warnings.dropped})


def show_batches(register: Register, batches: BatchService) -> None:
    register(BATCHES, lambda: {(status,): count for status, count in batches.counts().items()})
    register(BATCHES_ENDED, lambda: {(status,): count for status, count in batches.ended().items()})
    register(BATCH_LINES, lambda: {(state,): count for state, count in batches.lines().items()})


def show_stored_responses(register: Register, response_store: ResponseStore) -> None:
    register(RESPONSES_STORED, lambda: {(outcome,): count for outcome, count in response_store.outcomes.items()})


def show_idempotency(register: Register, idempotency: Idempotency) -> None:
    register(IDEMPOTENCY, lambda: {(outcome,): count for outcome, count in idempotency.outcomes.items()})


def show_hooks(register: Register, hooks: HookRunner) -> None:
    register(HOOK_RUNS, lambda: {(name, outcome): count for (name, outcome), count in hooks.outcomes.items()})


def show_mirroring(register: Register, mirroring: Mirroring) -> None:
    totals = mirroring.totals
    register(
        MIRRORED,
        lambda: {(*key, outcome): count for key, each in totals.items() for outcome, count in each.outcomes.items()},
    )
    register(
        MIRROR_DIFFERENT,
        lambda: {(*key, what): count for key, each in totals.items() for what, count in each.different.items()},
    )
    register(
        MIRROR_SECONDS,
        lambda: {(*key, side): total for key, each in totals.items() for side, total in each.seconds.items()},
    )
    register(
        MIRROR_TTFT,
        lambda: {(*key, side): total for key, each in totals.items() for side, total in each.ttft_seconds.items()},
    )
    register(
        MIRROR_TOKENS,
        lambda: {(*key, side): total for key, each in totals.items() for side, total in each.tokens.items()},
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
