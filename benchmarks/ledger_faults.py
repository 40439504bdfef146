"""Many requests with random faults, and a check of the ledgers afterwards.

    python -m benchmarks.ledger_faults [--requests 20000] [--clients 24] [--seed 1] [--result FILE]

Two gateways share one Redis, and one bundled engine behind a relay. Clients disconnect at a random chunk, or before the
first one. The relay cuts connections to the engine at random. Every few seconds a gateway or the Redis is killed
(kill -9) and started again. Afterwards:

* the tokens of the ledgers, receipts and unbilled work together, equal the engine's own count, to the token;
* no event id occurs twice, no call has two receipts, and each chain verifies;
* once the leases have ended, no reservation holds anything;
* the rows that were shipped through Redis and collected from it equal these ledgers, byte for byte.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import redis

from gateway.billing.ledger import verify
from gateway.billing.ledger.chain import chains, segments
from gateway.billing.ledger.collector import collect
from gateway.billing.ledger.compaction import read_lines
from gateway.billing.ledger.rows import OpenCall, UnbilledWork, attempts_left_open
from gateway.billing.ledger.rows import decode as decode_row
from gateway.limits.limiter import LEASE_SECONDS
from tests.e2e.processes import (
    DEMO,
    Gateway,
    Running,
    deployment,
    engine,
    gateway,
    key,
    simple_policy,
    tenant,
)
from tests.ports import free_port
from tests.redis_server import RedisServer

CUT_SHARE = 0.005  # of the chunks that the relay passes on to a gateway
LEAVE_SHARE = 0.3  # of streams whose client disconnects
LEAVE_AT_ONCE_SHARE = 0.03  # of all requests whose client disconnects before the first byte
FAULT_SECONDS = (2.0, 6.0)  # between two kills
STARTS_MAX = 5
MAX_TOKENS = 12
REQUEST_SECONDS = 60.0
QUIET_SECONDS = 180.0  # for all open calls to be closed at the end


@dataclass
class Findings:
    """What happened, and what the ledgers, the engine and the storage say about it afterwards."""

    requests: int
    seconds: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)  # outcomes as the clients saw them
    kills: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)  # by kind
    outcomes: Counter[str] = field(default_factory=Counter)  # of receipts
    estimated: int = 0  # receipts
    cuts: int = 0
    ledger_tokens: tuple[int, int] = (0, 0)  # prompt, generation
    engine_tokens: tuple[int, int] = (0, 0)
    event_ids_twice: int = 0
    calls_twice: int = 0
    left_open: int = 0
    broken: str | None = None
    held: int = 0  # by reservations, after the lease time
    collected: bool = False

    @property
    def good(self) -> bool:
        faults = (self.event_ids_twice, self.calls_twice, self.left_open, self.held)
        tokens_agree = self.ledger_tokens == self.engine_tokens
        return tokens_agree and not any(faults) and self.broken is None and self.collected

    def lines(self) -> Iterator[str]:
        yield f"{self.requests} requests in {self.seconds:.0f} s: {listed(self.ends)}"
        yield f"kills: {listed(self.kills)}; connections to the engine cut: {self.cuts}"
        yield f"rows: {listed(self.rows)}; receipts: {listed(self.outcomes)}; {self.estimated} estimated"
        yield f"tokens of the ledgers {self.ledger_tokens}, of the engine {self.engine_tokens} (prompt, generation)"
        yield f"event ids twice {self.event_ids_twice}, calls billed twice {self.calls_twice}, open {self.left_open}"
        yield f"chains: {self.broken or 'whole'}; held by reservations after the lease time: {self.held}"
        yield f"collected from the streams: {'the same rows' if self.collected else 'DIFFERENT ROWS'}"
        yield "all checks passed" if self.good else "CHECKS FAILED"


def listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


class Cutter:
    """A relay that cuts connections at random."""

    def __init__(self, url: str, rng: random.Random) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname, address.port
        self._dice = rng
        self.cuts = 0
        self.cutting = True

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        try:
            yield f"http://{host}:{port}"
        finally:
            server.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            engine_reader, engine_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        both = [
            asyncio.create_task(self._pass_on(reader, engine_writer, 0.0)),
            asyncio.create_task(self._pass_on(engine_reader, writer, CUT_SHARE)),
        ]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for each in both:
            each.cancel()
        await asyncio.wait(both)
        for end in (writer, engine_writer):
            end.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, share: float) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if self.cutting and self._dice.random() < share:
                    self.cuts += 1
                    return
                writer.write(data)
                await writer.drain()


class Replica:
    """One gateway, which keeps its address and its ledger over restarts."""

    def __init__(
        self, name: str, folder: Path, policy: dict[str, Any], storage: str, *,
        environment: Mapping[str, str] = MappingProxyType({}), **settings: str,
    ) -> None:  # fmt: skip
        """`settings` override those that all replicas share. `environment` has further variables of the process."""
        given: dict[str, Any] = {"ledger_dir": str(folder / "ledger"), "log_level": "error", "ledger_ship": storage}
        self.name = name
        self.port = free_port()
        self._start = partial(
            gateway, folder / name, policy, storage=storage, port=self.port, replica=name, environment=environment,
            **given | settings,
        )  # fmt: skip
        self._process = ExitStack()
        self.front: Gateway | None = None

    def start(self) -> None:
        """Start the gateway. Retries like a supervisor, since a start fails while Redis is restarting."""
        for _ in range(STARTS_MAX - 1):
            with contextlib.suppress(AssertionError):
                self.front = self._process.enter_context(self._start())
                return
        self.front = self._process.enter_context(self._start())

    def kill(self) -> None:
        assert self.front is not None
        self.front.kill()
        self._process.close()

    def stop(self) -> None:
        """Stop the gateway regularly. It must exit cleanly."""
        self._process.close()


async def ask(port: int, number: int, rng: random.Random, ends: Counter[str]) -> None:
    """Send one request, and count how it ends."""
    stream = rng.random() < 0.7
    body = {
        "model": DEMO, "stream": stream, "max_tokens": rng.randint(1, MAX_TOKENS), "ignore_eos": True,
        "messages": [
            {"role": "system", "content": f"You are assistant {number % 7}. Be brief, be kind, and count well."},
            {"role": "user", "content": f"Question {number}"},
        ],
    }  # fmt: skip
    leave_after = 0 if rng.random() < LEAVE_AT_ONCE_SHARE else None
    if stream and leave_after is None and rng.random() < LEAVE_SHARE:
        leave_after = rng.randint(1, MAX_TOKENS)
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key('dev')}\r\n"
    head += f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head.encode() + content)
            if leave_after == 0:
                await asyncio.sleep(rng.random() * 0.05)
                ends["left at once"] += 1
                return
            received = b""
            while data := await reader.read(65536):
                received += data
                if leave_after is not None and received.count(b"data: ") >= leave_after:
                    ends["left on the way"] += 1
                    return
            ends[_end_of(received)] += 1
    except (OSError, asyncio.IncompleteReadError):
        ends["gateway away"] += 1
        await asyncio.sleep(0.3)
    except TimeoutError:
        ends["NO ANSWER IN TIME"] += 1
    finally:
        if writer is not None:
            writer.transport.abort()


def _end_of(received: bytes) -> str:
    status = received[9:12].decode()
    if status != "200":
        return f"status {status}" if status else "gateway away"
    if b"data: [DONE]" in received or received.rstrip().endswith(b"}"):
        return "answered"
    return "error in the stream" if b'"error"' in received else "cut off"


async def inject_faults(replicas: list[Replica], store: RedisServer, rng: random.Random, kills: Counter[str]) -> None:
    while True:
        await asyncio.sleep(rng.uniform(*FAULT_SECONDS))
        if rng.random() < 0.25:
            kills["redis"] += 1
            await asyncio.to_thread(store.stop)
            await asyncio.sleep(rng.random() * 0.5)
            await asyncio.to_thread(store.start)
        else:
            replica = rng.choice(replicas)
            kills["gateway"] += 1
            await asyncio.to_thread(replica.kill)
            await asyncio.to_thread(replica.start)


async def run(folder: Path, requests: int, clients: int, seed: int) -> Findings:
    findings, rng, began = Findings(requests), random.Random(seed), time.monotonic()
    with ExitStack() as stack:
        served = stack.enter_context(engine(folder / "engine", "--max-num-seqs", "16"))
        store_folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="wp"))  # a socket's path must be short
        store = RedisServer(Path(store_folder), durable=True)
        store.start()
        stack.callback(store.stop)
        cutter = Cutter(served.url, rng)
        async with cutter.listening() as url:
            limits = {"concurrency": 10 * clients, "tokens": "100M/1m", "budget": {"amount": "1000", "per": "total"}}
            policy = simple_policy(url, deployments=[deployment("local", url)], tenants=[tenant("dev", limits=limits)])
            replicas = [Replica(name, folder, policy, store.url) for name in ("one", "two")]
            for replica in replicas:
                await asyncio.to_thread(replica.start)
            await _requests(replicas, store, requests, clients, rng, findings)
            cutter.cutting, findings.cuts = False, cutter.cuts
            findings.seconds = time.monotonic() - began
            await asyncio.to_thread(_wait_until_closed, folder / "ledger", served)
            await asyncio.to_thread(_wait_until_released, store)
            await asyncio.to_thread(_wait_until_collected, folder / "ledger", folder / "collected", store)
            for replica in replicas:
                await asyncio.to_thread(replica.stop)
        examine(folder / "ledger", served, store, findings)
    return findings


async def _requests(
    replicas: list[Replica], store: RedisServer, requests: int, clients: int, rng: random.Random, findings: Findings
) -> None:
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            await ask(rng.choice(replicas).port, number, rng, findings.ends)
            if number and number % 1000 == 0:
                print(f"{number} requests, {listed(findings.kills)} killed", flush=True)

    fault_injection = asyncio.create_task(inject_faults(replicas, store, rng, findings.kills))
    await asyncio.gather(*(client() for _ in range(clients)))
    while not fault_injection.done():  # do not cancel it during a restart
        if all(replica.front is not None and replica.front.process.poll() is None for replica in replicas):
            with contextlib.suppress(redis.RedisError), store.client() as connection:
                connection.ping()
                fault_injection.cancel()
                break
        await asyncio.sleep(0.01)
    with contextlib.suppress(asyncio.CancelledError):
        await fault_injection


def rows_of(ledger: Path) -> Iterator[Any]:
    for chain in chains(ledger):
        for segment in segments(chain):
            yield from (decode_row(line) for line in read_lines(segment) if line.endswith(b"\n"))


def open_attempts(ledger: Path) -> int:
    opened: dict[str, list[OpenCall]] = {}
    for row in rows_of(ledger):
        if isinstance(row, OpenCall):
            opened.setdefault(row.call_id, []).append(row)
        elif getattr(row, "call_id", None) in opened:
            by = "unbilled" if isinstance(row, UnbilledWork) else "receipt"
            opened[row.call_id] = attempts_left_open(
                opened[row.call_id], by=by, attempt=getattr(row, "attempt", 0), deployment=row.deployment
            )
    return sum(map(len, opened.values()))


def _wait_until_closed(ledger: Path, served: Running) -> None:
    deadline = time.monotonic() + QUIET_SECONDS
    while time.monotonic() < deadline:
        running = served.metric("vllm:num_requests_running") + served.metric("vllm:num_requests_waiting")
        if not running and not open_attempts(ledger):
            return
        time.sleep(0.5)


def held_by_reservations(store: RedisServer) -> int:
    held = 0
    with store.client() as connection:
        for name in connection.scan_iter("wp:*:account:*"):
            held += int(connection.hget(name, "held") or 0)
        for name in connection.scan_iter("wp:*:leases:*"):
            held += int(connection.zcard(name))
    return held


def _wait_until_released(store: RedisServer) -> None:
    deadline = time.monotonic() + LEASE_SECONDS
    while time.monotonic() < deadline and held_by_reservations(store):
        time.sleep(0.5)


def _wait_until_collected(ledger: Path, into: Path, store: RedisServer) -> None:
    deadline = time.monotonic() + QUIET_SECONDS
    while time.monotonic() < deadline and not _same_rows(ledger, into):
        collect(store.url, into)
        time.sleep(0.5)


def _same_rows(ledger: Path, collected: Path) -> bool:
    """Whether both have the same chains, byte for byte."""
    return [_bytes_of(chain) for chain in chains(ledger)] == [_bytes_of(chain) for chain in chains(collected)]


def _bytes_of(chain: Path) -> list[bytes]:
    return [b"".join(read_lines(segment)) for segment in segments(chain)]


def examine(ledger: Path, served: Running, store: RedisServer, findings: Findings) -> None:
    event_ids, calls = Counter[str](), Counter[str]()
    prompt = generation = 0
    for row in rows_of(ledger):
        kind = type(row).__struct_config__.tag
        findings.rows[kind] += 1
        event_ids[row.event_id] += 1
        if kind == "receipt":
            calls[row.call_id] += 1
            findings.outcomes[row.outcome] += 1
            findings.estimated += row.source == "estimate"
        if kind in ("receipt", "unbilled"):
            prompt += row.input_uncached + row.cache_read + row.cache_write
            generation += row.output
    findings.ledger_tokens = (prompt, generation)
    findings.engine_tokens = (
        int(served.metric("vllm:prompt_tokens_total")),
        int(served.metric("vllm:generation_tokens_total")),
    )
    findings.event_ids_twice = sum(count > 1 for count in event_ids.values())
    findings.calls_twice = sum(count > 1 for count in calls.values())
    findings.left_open = open_attempts(ledger)
    broken = verify(ledger, read_lines).broken
    findings.broken = str(broken) if broken else None
    findings.held = held_by_reservations(store)
    findings.collected = _same_rows(ledger, ledger.parent / "collected")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="an empty folder that keeps the ledgers and logs")
    parser.add_argument("--result", type=Path, help="a file for the printed result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        findings = asyncio.run(run(folder, arguments.requests, arguments.clients, arguments.seed))
    lines = list(findings.lines())
    print("\n".join(lines))
    if arguments.result:
        machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"
        title = f"benchmarks/ledger_faults.py, {datetime.now(UTC):%Y-%m-%d}: {machine}, seed {arguments.seed}"
        arguments.result.write_text("\n".join([title, "", *lines, ""]))
    raise SystemExit(not findings.good)


if __name__ == "__main__":
    main()
