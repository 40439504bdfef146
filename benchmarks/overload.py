"""Goodput and latency at three times the calls that the deployments can answer: `python -m benchmarks.overload`.

Two servers with realistic service times (`benchmarks.timed_server`) behind the real gateway, and clients that arrive as
a Poisson process, in an open loop. The phases, one after the other on the same gateway:

1. capacity: a closed loop of twice as many clients as there are slots;
2. level: real-time calls at that rate;
3. overload: real-time calls at twice that rate, a tenth of them from a tenant with a request limit, and batch calls at
   the capacity's rate;
4. drain: the calls that are still queued are answered.

Goodput is the number of real-time calls per second that started in a phase and were answered completely.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvloop
import yaml

from benchmarks.gateway.run import cpu_seconds, listening, machine, resident_mib
from benchmarks.open_loop import Call, Clients, offered, payload, percentiles_ms
from gateway.core.api_keys import hash_key

RESULTS = Path(__file__).parent / "results"
LOAD_CPU = 1
KEYS = {"a": "wp-a-0123456789abcdef", "b": "wp-b-0123456789abcdef", "limited": "wp-limited-0123456789abcdef"}
MAX_TOKENS = (8, 12, 16, 24, 40)
PACE = 40  # tokens per second
WAIT = {"max_wait": "2s", "max_queue": 500}  # of real-time calls
BATCH = {"max_wait": "1h", "max_queue": 500, "hold": False}
REALTIME_SHARE = 2.0  # as a multiple of the capacity, in the overload; batch has the rest
GOODPUT_MIN, TTFT_P99_MAX, MEMORY_MAX, RETRY_AFTER_MAX_SECONDS = 0.95, 2.0, 1.10, 120.0
SAMPLE_SECONDS = 1.0
WARM_SECONDS = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="duration of each of the phases level and overload"
    )
    parser.add_argument("--capacity-seconds", type=float, default=20.0)
    parser.add_argument("--slots", type=int, default=12, help="concurrency of each of the two servers")
    parser.add_argument("--factor", type=float, default=3.0, help="offered load, as a multiple of the capacity")
    parser.add_argument("--out", type=Path, help="the file for the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, components(options, Path(folder)) as (pid, port):
        measured = uvloop.run(measure(options, pid, port))
    print(text_of(measured))
    save(options, measured)
    sys.exit(0 if all(measured["bars"].values()) else 1)


@contextlib.contextmanager
def components(options: argparse.Namespace, folder: Path) -> Iterator[tuple[int, int]]:
    """Start the servers and the gateway. Yields the gateway's process id and port."""
    server = ["benchmarks.timed_server", "--slots", str(options.slots)]
    with contextlib.ExitStack() as running:
        ports = [running.enter_context(listening(LOAD_CPU, *server))[1] for _ in range(2)]
        policy = folder / "policy.yaml"
        capacity = options.slots / (sum(MAX_TOKENS) / len(MAX_TOKENS) / PACE) * 2
        policy.write_text(yaml.safe_dump(policy_for(ports, options.slots, limit=int(capacity / 20))))
        settings = {"WARMPATH_DATA_DIR": str(folder / "data"), "WARMPATH_LOG_LEVEL": "error"}
        command = ["gateway", "serve", "--policy", str(policy), "--port", "0"]
        yield running.enter_context(listening(0, *command, env=settings))


def policy_for(ports: Sequence[int], slots: int, limit: int) -> dict[str, Any]:
    tenants: list[dict[str, Any]] = [
        {"name": name, "keys": [{"id": name, "hash": hash_key(key, "")}]} for name, key in KEYS.items()
    ]
    tenants[-1]["limits"] = {"requests": f"{limit}/1s"}
    return {
        "deployments": [
            {"name": f"s{n}", "base_url": f"http://127.0.0.1:{port}/v1", "model": "mock", "max_concurrency": slots}
            for n, port in enumerate(ports)
        ],
        "models": [{"name": "mock", "deployments": [f"s{n}" for n in range(len(ports))]}],
        "cache": {"scope": "off"},
        "classes": {"realtime": WAIT, "batch": BATCH},
        "rules": [{"match": {"service_tier": "flex"}, "class": "batch"}],
        "tenants": tenants,
    }


def payloads(tenant: str, **more: Any) -> list[bytes]:
    message = {"role": "user", "content": f"What does a prefix cache keep, and for how long? {tenant} " * 8}
    bodies = [{"model": "mock", "messages": [message], "max_tokens": n, "stream": True, **more} for n in MAX_TOKENS]
    return [payload(KEYS[tenant], {**body, "user": f"paced-{PACE}"}) for body in bodies]


async def measure(options: argparse.Namespace, pid: int, port: int) -> dict[str, Any]:
    clients, chance = Clients(port), random.Random(7)
    capacity = await capacity_of(clients, options, chance)
    print(f"capacity: {capacity:.1f} calls per second", file=sys.stderr, flush=True)
    rest = options.factor - REALTIME_SHARE
    phases = {
        "level": [("realtime", capacity, payloads("a"))],
        "overload": [
            ("realtime", 0.9 * REALTIME_SHARE * capacity, payloads("a") + payloads("b")),
            ("limited", 0.1 * REALTIME_SHARE * capacity, payloads("limited")),
            ("batch", rest * capacity, payloads("a", service_tier="flex")),
        ],
    }
    measured: dict[str, Any] = {"capacity_per_second": round(capacity, 1)}
    for name, mix in phases.items():
        memory: list[float] = []
        sampling = asyncio.create_task(sample(pid, memory))
        cpu, began = cpu_seconds(pid), time.monotonic()
        tasks = await offered(clients, mix, options.seconds, chance)
        ended = time.monotonic()
        used = cpu_seconds(pid) - cpu
        sampling.cancel()
        under_way = sum(not task.done() for task in tasks)
        calls = await asyncio.gather(*tasks)
        measured[name] = {
            **figures(calls, ended - began, ended),
            "under_way_at_the_end": under_way,
            "seconds_until_all_were_answered": round(time.monotonic() - ended, 1),
            "gateway_cpu": round(used / (ended - began), 2),
            "rss_mib": [round(each) for each in memory[:: max(1, len(memory) // 24)]],
        }
        print(f"{name}: {json.dumps(measured[name])}", file=sys.stderr, flush=True)
    clients.close()
    return {**measured, **verdict(measured)}


async def capacity_of(clients: Clients, options: argparse.Namespace, chance: random.Random) -> float:
    """Calls per second that the servers answer while all slots are in use and more calls are queued."""
    choices, answered, began = payloads("a"), Counter[bool](), time.monotonic()
    warm, end = began + WARM_SECONDS, began + WARM_SECONDS + options.capacity_seconds

    async def client() -> None:
        while time.monotonic() < end:
            call = await clients.send("capacity", chance.choice(choices))
            if warm <= (call.ended or 0.0) < end:
                answered[call.complete] += 1

    await asyncio.gather(*[client() for _ in range(2 * 2 * options.slots)])
    if answered[False]:
        raise SystemExit(f"{answered[False]} calls failed at capacity, without overload")
    return answered[True] / float(options.capacity_seconds)


async def sample(pid: int, memory: list[float]) -> None:
    while True:
        memory.append(resident_mib(pid))
        await asyncio.sleep(SAMPLE_SECONDS)


def figures(calls: Sequence[Call], seconds: float, ended: float) -> dict[str, Any]:
    """Figures of one phase. `ended` is its end, by the clock of the calls."""
    urgent = [call for call in calls if call.kind != "batch"]
    good = [call for call in urgent if call.complete]
    batch = [call for call in calls if call.kind == "batch"]
    done = [call for call in batch if call.complete]
    refused = [call for call in calls if call.status != 200]
    told = [call.retry_after_seconds for call in refused if call.retry_after_seconds is not None]
    return {
        "realtime_per_second": round(len(urgent) / seconds, 1),
        "goodput_per_second": round(len(good) / seconds, 2),
        "ttft_ms": percentiles_ms([call.first for call in good if call.first is not None]),
        "statuses": dict(Counter(str(call.status) for call in calls)),
        "cut": sum(call.status == 200 and not call.complete for call in calls),
        "refusals_ms": percentiles_ms([call.seconds for call in refused if call.kind != "batch"]),
        "refusals_without_retry_after": len(refused) - len(told),
        "retry_after_seconds": [min(told), max(told)] if told else [],
        "batch_per_second": round(len(batch) / seconds, 1),
        "batch_answered_meanwhile": sum((call.ended or ended) < ended for call in done),
        "batch_answered_in_the_end": len(done),
    }


def verdict(measured: dict[str, Any]) -> dict[str, Any]:
    level, overload = measured["level"], measured["overload"]
    rss = overload["rss_mib"]
    goodput = overload["goodput_per_second"] / level["goodput_per_second"]
    ttft = overload["ttft_ms"]["p99"] / level["ttft_ms"]["p99"]
    memory = max(rss[len(rss) // 2 :]) / max(rss[: len(rss) // 2])
    statuses = set(overload["statuses"])
    return {
        "goodput_ratio": round(goodput, 3),
        "ttft_p99_ratio": round(ttft, 2),
        "memory_ratio": round(memory, 3),
        "bars": {
            f"goodput at least {GOODPUT_MIN:g} of the level": goodput >= GOODPUT_MIN,
            f"TTFT p99 at most {TTFT_P99_MAX:g} times the level": ttft <= TTFT_P99_MAX,
            f"memory of the second half at most {MEMORY_MAX:g} times the first": memory <= MEMORY_MAX,
            "every call is answered completely, or rejected with 429 or 503": statuses <= {"200", "429", "503"}
            and not overload["cut"],
            f"every rejection has a retry-after of at most {RETRY_AFTER_MAX_SECONDS:g} s": (
                not overload["refusals_without_retry_after"]
                and overload["retry_after_seconds"][1] <= RETRY_AFTER_MAX_SECONDS
            ),
            "batch calls are queued, and answered in the drain": (
                overload["batch_answered_meanwhile"] < overload["batch_answered_in_the_end"]
            ),
        },
    }


def text_of(measured: dict[str, Any]) -> str:
    lines = [f"capacity {measured['capacity_per_second']} calls per second"]
    for name in ("level", "overload"):
        phase = measured[name]
        lines.append(
            f"{name:9} real-time {phase['realtime_per_second']:6.1f}/s  goodput {phase['goodput_per_second']:6.2f}/s  "
            f"TTFT p50 {phase['ttft_ms']['p50']:6.0f} ms p99 {phase['ttft_ms']['p99']:6.0f} ms  "
            f"statuses {phase['statuses']}  gateway CPU {phase['gateway_cpu']:.2f}  RSS {phase['rss_mib'][-1]} MiB"
        )
    return "\n".join([*lines, *(f"{'holds' if holds else 'FAILS':5} {bar}" for bar, holds in measured["bars"].items())])


def save(options: argparse.Namespace, measured: dict[str, Any]) -> None:
    now = datetime.datetime.now(datetime.UTC)
    path: Path = options.out or RESULTS / f"overload-{now:%Y-%m-%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    given = {name: value for name, value in vars(options).items() if name != "out"}
    about = {"when": now.isoformat(timespec="seconds"), "machine": machine(), "options": given}
    path.write_text(json.dumps({**about, **measured}, indent=1) + "\n")
    path.with_suffix(".txt").write_text(text_of(measured) + "\n")


if __name__ == "__main__":
    main()
