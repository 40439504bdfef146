"""CPU cost of the queue: microseconds to join it, to be granted a slot and to leave it, by the number of queued calls.

    python benchmarks/queueing.py [--calls 2000] [--result FILE]

One deployment with one slot, and a hundred tenants with random call lengths and deadlines. A "turn" is all work done
when the slot is released. The first row is a call that finds the slot free while no call is queued.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gateway.core.errors import GatewayError
from gateway.deployments.fleet import Fleet
from gateway.deployments.slot_permit import SlotPermit
from gateway.policy import LatencyClass, Model, Policy
from gateway.providers.offline import OfflineProvider
from gateway.queueing.scheduler import QueueScheduler

ROUNDS = 5
WAITING = (100, 1_000, 10_000, 100_000)
TENANTS = 100


@dataclass(frozen=True, slots=True)
class QueuedCall:
    """A call with only the fields that the queue reads."""

    tenant_name: str
    tokens_estimate: int
    latency_class: LatencyClass
    model: Model
    class_name: str = "realtime"
    fingerprint: tuple[int, ...] = ()
    prompt_tokens_estimate: int = 0
    session: str | None = None
    may_be_held: bool = False

    @property
    def tenant_path(self) -> tuple[str, ...]:
        return (self.tenant_name,)


@dataclass(slots=True, eq=False)
class Waiting:
    call: QueuedCall
    due: float
    done: bool = False
    permit: SlotPermit | None = None

    def grant(self, permit: SlotPermit) -> None:
        self.permit = permit
        permit.release()  # the call ends at once

    def reject(self, error: GatewayError) -> None:
        raise AssertionError(error.message)


class Round:
    """A scheduler with `waiting` queued calls, and `more` calls that are not queued yet."""

    def __init__(self, waiting: int, more: int) -> None:
        policy = Policy.model_validate(
            {
                "deployments": [{"name": "a", "base_url": "http://a.invalid", "model": "m", "max_concurrency": 1}],
                "models": [{"name": "m", "deployments": ["a"]}],
                "classes": {"realtime": {"max_queue": waiting + more}},
                "tenants": [{"name": "t"}],
            }
        )
        self.fleet, chance = Fleet(lambda deployment: OfflineProvider()), random.Random(waiting)
        self.fleet.apply(policy)
        self.scheduler: QueueScheduler[Waiting] = QueueScheduler(self.fleet, waiting_max=waiting + more)
        limits, (model,) = policy.classes["realtime"], policy.models
        calls = [
            Waiting(
                QueuedCall(f"t{chance.randrange(TENANTS)}", chance.randrange(10, 4000), limits, model), chance.random()
            )
            for _ in range(waiting + more)
        ]
        self.coming = calls[waiting:]
        for each in calls[:waiting]:
            self.scheduler.add(each, 0.0)
        chance.shuffle(calls)
        self.leaving = calls

    def at_once(self) -> None:
        for each in self.coming:
            permit = self.scheduler.take_now(each.call, 0.0)
            assert permit is not None
            permit.release()

    def join(self) -> None:
        for each in self.coming:
            self.scheduler.add(each, 0.0)

    def turn(self) -> None:
        """Grant the free slot to all calls, one after the other."""
        self.scheduler.grant_free_slots(0.0)

    def leave(self) -> None:
        for each in self.leaving[: len(self.coming)]:
            self.scheduler.remove(each)


def micros_of(work: Callable[[], None], count: int) -> float:
    started = time.process_time()
    work()
    return (time.process_time() - started) / count * 1e6


def measure(calls: int) -> dict[str, dict[str, float]]:
    """Microseconds per call: the minimum over the rounds, since other processes only add time."""
    rows = {"0 wait": {"at once": min(micros_of(Round(0, calls).at_once, calls) for _ in range(ROUNDS))}}
    for waiting in WAITING:
        found: dict[str, float] = {}
        for _ in range(ROUNDS):
            each = Round(waiting, calls)
            joined, left = micros_of(each.join, calls), micros_of(each.leave, calls)
            turns = each.scheduler.waiting
            for name, micros in (("join", joined), ("leave", left), ("turn", micros_of(each.turn, turns))):
                found[name] = min(micros, found.get(name, micros))
        rows[f"{waiting} wait"] = found
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--result", type=Path, help="write the figures to this file, as JSON")
    options = parser.parse_args()
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    rows = measure(options.calls)
    print(machine)
    for name, row in rows.items():
        print(f"{name:16}" + "".join(f"{what:>10} {micros:6.1f} us" for what, micros in row.items()))
    if options.result:
        found = {"machine": machine, "date": datetime.now(UTC).date().isoformat(), "unit": "us"}
        found["load_average"] = f"{os.getloadavg()[0]:.1f}"
        rounded = {name: {what: round(micros, 1) for what, micros in row.items()} for name, row in rows.items()}
        options.result.write_text(json.dumps({**found, "rows": rounded}, indent=1) + "\n")


if __name__ == "__main__":
    main()
