"""One run: starts everything, runs load and faults, heals, stops, and checks."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.chaos.calls import Call, ask, draw
from benchmarks.chaos.faults import ChaosGateway, Engines, Faults, Gateways, is_ready
from benchmarks.chaos.findings import Findings, examine
from benchmarks.chaos.hostile_clients import BODY_BYTES_MAX, VISITS, visit
from benchmarks.chaos.machine import Clock, Disk
from benchmarks.chaos.servers import Tap, behaviours
from benchmarks.chaos.watch import Watch
from benchmarks.ledger_faults import Replica, held_by_reservations, open_attempts
from gateway.limits.limiter import LEASE_SECONDS
from tests.e2e.faults.upstreams import listening
from tests.e2e.processes import DEMO, PRICE, Running, deployment, engine, tenant
from tests.ports import free_port
from tests.redis_server import RedisServer

ENGINE_OPTIONS = ("--max-num-seqs", "16")
HOSTILE_SHARE = 0.4  # hostile clients, as a share of the innocent ones
PAUSE_SECONDS = (0.02, 0.3)  # between two calls of one client
BURST_TOKENS = 2
QUIET_SECONDS = 180.0  # for all open calls to be closed at the end
ENGINE_NAMES = ("a", "b", "mortal")


def policy_of(engines: Mapping[str, str], scripted: Mapping[str, int]) -> dict[str, Any]:
    """All tenants and models. Every model has a healthy deployment: `a` and `b`, or the scripted server `good`."""
    servers = [
        {
            "name": name, "provider": "vllm", "base_url": f"http://127.0.0.1:{port}/v1", "model": "m", "price": PRICE,
            "max_concurrency": 256, "media": {"like": "qwen2.5-vl"},
        }
        for name, port in scripted.items()
    ]  # fmt: skip
    unreliable = [name for name in scripted if name != "good"]
    far = {"concurrency": 5000, "tokens": "1000M/1m", "requests": "1M/1m"}  # limits that no innocent tenant reaches
    money = {"budget": {"amount": "100000", "per": "day"}}
    return {
        "deployments": [*(deployment(name, url) for name, url in engines.items()), *servers],
        "models": [
            {"name": DEMO, "deployments": list(engines)},
            {"name": "seeing", "deployments": ["good", "500"]},
            *(
                # A server may also pretend that a prompt is too long for it.
                {"name": name, "deployments": [name, "good"], "fallbacks_when": {"context": [DEMO]}}
                if number % 2
                else {"name": name, "deployments": [name], "fallbacks": [DEMO], "fallbacks_when": {"context": [DEMO]}}
                for number, name in enumerate(unreliable)
            ),
        ],
        # A burst must be served by a machine of any speed and with any other load, so queues and times are long.
        "classes": {
            "realtime": {"max_queue": 5000, "max_wait": "300s", "inter_token": "20s", "ttft": "400s"},
            "batch": {"max_queue": 5000, "max_wait": "300s"},
        },
        "rules": [{"match": {"header": {"x-class": "batch"}}, "class": "batch"}],
        "tenants": [
            tenant("acme", limits={**far, **money}),
            tenant("beta", limits={**far, "parts": [{"match": {"model": DEMO}, "concurrency": 5000}]}),
            tenant("gamma", limits={"requests": "1M/1m"}),
            tenant("free"),
            tenant("hostile", limits={"concurrency": 64}),
            tenant("narrow", limits={"requests": "2/10s"}),
            tenant("poor", limits={"budget": {"amount": "0.00002", "per": "total"}}),
        ],
        "storage_outage": {"limits": "local_share", "replicas": 2},
    }


class Load:
    """The clients. They begin no call after `stop`, and end those that they have begun."""

    def __init__(self, gateways: Gateways, findings: Findings, unreliable: list[str], seed: int) -> None:
        self._gateways = gateways
        self._findings = findings
        self._unreliable = unreliable
        self._seed = seed
        self._numbers = iter(range(10**9))
        self._stopping = False

    async def run(self, clients: int) -> None:
        hostile = max(2, round(clients * HOSTILE_SHARE))
        async with asyncio.TaskGroup() as tasks:
            for number in range(clients):
                tasks.create_task(self._innocent(random.Random(f"{self._seed} innocent {number}")))
            for number in range(hostile):
                tasks.create_task(self._hostile(random.Random(f"{self._seed} hostile {number}")))

    def stop(self) -> None:
        self._stopping = True

    async def burst(self, streams: int) -> None:
        """Begin so many streams at once."""
        rng = random.Random(f"{self._seed} burst {next(self._numbers)}")
        await asyncio.gather(*(self._one(self._stream(rng), rng) for _ in range(streams)))

    def _stream(self, rng: random.Random) -> Call:
        messages = [{"role": "user", "content": f"Number {next(self._numbers)}"}]
        body = {"model": DEMO, "messages": messages, "max_tokens": BURST_TOKENS, "stream": True}
        return Call("burst", "chat/completions", body, rng.choice(("acme", "beta", "gamma", "free")))

    async def _one(self, call: Call, rng: random.Random) -> None:
        self._findings.note_innocent(call.kind, await ask(self._gateways, call, rng))

    async def _innocent(self, rng: random.Random) -> None:
        while not self._stopping:
            await self._one(draw(rng, next(self._numbers), self._unreliable), rng)
            await asyncio.sleep(rng.uniform(*PAUSE_SECONDS))

    async def _hostile(self, rng: random.Random) -> None:
        while not self._stopping:
            kind = rng.choice(list(VISITS))
            self._findings.note_hostile(kind, await visit(self._gateways, kind, rng))
            await asyncio.sleep(rng.uniform(*PAUSE_SECONDS))


class Process:
    """An engine that can be killed and started again at the same address.

    A stack trace in its log, or an exit with an error, is a problem that is noted.
    """

    def __init__(self, folder: Path, problems: list[str]) -> None:
        self._folder = folder
        self._problems = problems
        self.port = free_port()
        self._process = ExitStack()

    def start(self) -> Running:
        return self._process.enter_context(engine(self._folder, *ENGINE_OPTIONS, port=self.port))

    def stop(self) -> None:
        note_failure(self._process.close, self._problems)


def note_failure(stop: Callable[[], None], problems: list[str]) -> None:
    """Stop a process. What its log or its exit code says against it is a problem of the run, and does not end it."""
    try:
        stop()
    except AssertionError as error:
        *_, last = str(error).strip().splitlines() or [""]
        problems.append(f"a process did not end well: {last}")


async def run(folder: Path, seconds: float, clients: int, seed: int) -> Findings:
    """Run the load and the faults for so many seconds, and check everything."""
    findings = Findings(seed)
    with ExitStack() as stack:
        store = RedisServer(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wp"))), durable=True)
        store.start()
        stack.callback(store.stop)
        processes = {name: Process(folder / name, findings.problems) for name in ENGINE_NAMES}
        for each in processes.values():
            stack.callback(each.stop)
        mortal = processes["mortal"]
        lasting = {name: processes[name].start() for name in ("a", "b")}
        engines = Engines(lasting["a"], lasting["b"], mortal.start(), lambda: restart())

        async def restart() -> None:
            await asyncio.to_thread(mortal.stop)
            engines.mortal = await asyncio.to_thread(mortal.start)

        tap = Tap(mortal.port)
        scripted = stack.enter_context(listening(behaviours(seed))).ports
        async with tap.listening() as url:
            policy = policy_of({**{name: each.url for name, each in lasting.items()}, "mortal": url}, scripted)
            gateways = Gateways(_gateway(stack, name, folder, policy, store.url) for name in ("one", "two"))
            findings.notes = _notes(gateways)
            for front in gateways:
                await asyncio.to_thread(front.replica.start)
            load = Load(gateways, findings, [name for name in scripted if name != "good"], seed)
            faults = Faults(gateways, engines, store, load.burst, random.Random(seed), findings.problems)
            await _run_load(load, faults, clients, seconds, lasting, findings)
            await asyncio.to_thread(_wait_until_closed, folder / "ledger", list(lasting.values()))
            await _check_at_rest(gateways, store, findings)
            for front in gateways:
                await asyncio.to_thread(note_failure, front.replica.stop, findings.problems)
        examine(folder / "ledger", lasting, tap.counted, findings)
    return findings


def _gateway(stack: ExitStack, name: str, folder: Path, policy: dict[str, Any], storage: str) -> ChaosGateway:
    (folder / name).mkdir(parents=True, exist_ok=True)
    clock, disk = Clock(folder / name), Disk(folder / "ledger" / name)
    stack.callback(disk.close)
    replica = Replica(
        name, folder, policy, storage, environment=clock.environment, log_level="warning",
        max_body_bytes=str(BODY_BYTES_MAX),
    )  # fmt: skip
    return ChaosGateway(replica, clock, disk)


def _notes(gateways: Gateways) -> list[str]:
    disks = "tmpfs in a mount namespace" if all(each.disk.real for each in gateways) else "NOT POSSIBLE HERE"
    clocks = "a preloaded C library" if all(each.clock.real for each in gateways) else "NOT POSSIBLE HERE"
    return [f"full disk: {disks}; clock steps: {clocks}"]


async def _run_load(
    load: Load, faults: Faults, clients: int, seconds: float, lasting: Mapping[str, Running], findings: Findings
) -> None:
    began, watch = time.monotonic(), Watch()

    def pids() -> dict[str, int]:
        return {"gateway two": faults.gateways[1].pid} | {
            f"engine {name}": each.process.pid for name, each in lasting.items()
        }

    watching = asyncio.create_task(watch.run(pids))
    clients_done = asyncio.create_task(load.run(clients))
    await faults.run(seconds)
    load.stop()
    await clients_done
    findings.seconds = time.monotonic() - began
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    findings.growth = list(watch.growth())
    findings.problems += [f"not flat: {growth}" for growth in findings.growth if not growth.flat]
    findings.faults = faults.done
    for each in faults.gateways:
        each.clock.step(0)


def _wait_until_closed(ledger: Path, engines: list[Running]) -> None:
    deadline = time.monotonic() + QUIET_SECONDS
    while time.monotonic() < deadline:
        busy = sum(
            each.metric("vllm:num_requests_running") + each.metric("vllm:num_requests_waiting") for each in engines
        )
        if not busy and not open_attempts(ledger):
            return
        time.sleep(0.5)


def _still_held(store: RedisServer) -> int:
    """What reservations hold after the lease time."""
    deadline = time.monotonic() + LEASE_SECONDS + 15
    while (held := held_by_reservations(store)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return held


async def _check_at_rest(gateways: Gateways, store: RedisServer, findings: Findings) -> None:
    """After everything has healed: the gateways are ready, and nothing is held or in flight."""
    if held := await asyncio.to_thread(_still_held, store):
        findings.problems.append(f"reservations hold {held} after the lease time")
    for each in gateways:
        front = each.replica.front
        assert front is not None
        if not await asyncio.to_thread(is_ready, each.port):
            findings.problems.append(f"gateway {each.replica.name} is not ready after all has healed")
        for gauge in ("warmpath_inflight", "warmpath_deployment_inflight"):
            if left := await asyncio.to_thread(front.metric, gauge):
                findings.problems.append(f"gateway {each.replica.name}: {gauge} is {left} without load")
