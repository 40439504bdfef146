"""What routing costs the gateway: `PrefixAffinity.order` for many deployments, and memory for many sessions.

    python -m benchmarks.routing [--deployments 100] [--sessions 100000]

The sessions are chats of two requests behind one of eight system prompts, at deployments with 1M tokens of cache each.
Prints the time of one decision (median and 90 % quantile; other processes on the machine add to it), the CPU time of
everything that follows one call, and the growth of resident memory.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from array import array
from collections import deque
from dataclasses import dataclass, replace

from gateway.deployments.fleet import Fleet
from gateway.deployments.sent_call import SentCall
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.providers.offline import OfflineProvider
from gateway.routing.prefix_affinity import PrefixAffinity
from gateway.simulator.site import default_policy

CALLS_PER_SECOND = 50.0
IN_FLIGHT = 60
SYSTEM_BLOCKS, FIRST_BLOCKS, TURN_BLOCKS = 16, 24, 8


@dataclass(frozen=True, slots=True)
class BenchmarkCall:
    """What routing needs to know of a call."""

    fingerprint: tuple[int, ...]
    session: str
    may_be_held: bool = False
    tenant_name: str = "t"

    @property
    def prompt_tokens_estimate(self) -> int:
        return len(self.fingerprint) * BLOCK_TOKENS + BLOCK_TOKENS // 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deployments", type=int, default=100)
    parser.add_argument("--sessions", type=int, default=100_000)
    arguments = parser.parse_args()
    policy = default_policy(arguments.deployments)
    fleet = Fleet(lambda _: OfflineProvider())
    fleet.apply(policy)
    deployments, strategy, rng = fleet.deployments_of(policy.models[0]), PrefixAffinity(), random.Random(1)
    systems = [_blocks(rng, SYSTEM_BLOCKS) for _ in range(8)]
    in_flight: deque[tuple[BenchmarkCall, SentCall]] = deque()
    seconds = array("d")
    before_mib, cpu_before = _resident_mib(), time.process_time()
    now = 0.0
    waiting: deque[BenchmarkCall] = deque()  # sessions that will have their second request
    for number in range(2 * arguments.sessions):
        now += 1 / CALLS_PER_SECOND
        if number % 2 and waiting:
            first = waiting.popleft()
            call = replace(first, fingerprint=(*first.fingerprint, *_blocks(rng, TURN_BLOCKS)))
        else:
            call = BenchmarkCall((*rng.choice(systems), *_blocks(rng, FIRST_BLOCKS)), f"session {number}")
            waiting.append(call)
        started = time.perf_counter()
        best = strategy.order(call, deployments, now)[0]
        seconds.append(time.perf_counter() - started)
        in_flight.append((call, best.deployment.send(call, now, prediction=best.prediction)))
        if len(in_flight) > IN_FLIGHT // 2:
            in_flight[-IN_FLIGHT // 2][1].first_chunk(now)
        if len(in_flight) > IN_FLIGHT:
            _finish(*in_flight.popleft(), now)
    cpu_seconds = time.process_time() - cpu_before
    ordered = sorted(seconds[len(seconds) // 2 :])
    print(
        f"order() of {len(deployments)} deployments: {1e6 * ordered[len(ordered) // 2]:.0f} us at the median,", end=" "
    )
    print(f"{1e6 * ordered[len(ordered) * 9 // 10]:.0f} us at 90 %")
    print(f"CPU time of a call in routing and estimates: {1e6 * cpu_seconds / len(seconds):.0f} us")
    print(f"{arguments.sessions} sessions: {_resident_mib() - before_mib:.0f} MiB")


def _blocks(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple([rng.getrandbits(63) for _ in range(count)])


def _finish(call: BenchmarkCall, sent: SentCall, now: float) -> None:
    tokens = call.prompt_tokens_estimate
    cached_tokens = sent.prompt.prediction.matched * BLOCK_TOKENS
    sent.learn_cached(tokens, cached_tokens)
    sent.learn_usage("", tokens, cached_tokens, 200)
    sent.end(now)


def _resident_mib() -> float:
    """The largest resident memory so far, which is the present one while memory only grows."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


if __name__ == "__main__":
    main()
