"""A burst of streams on each storage: `python -m benchmarks.gateway.burst [--streams 1000] [--rounds 3]`.

Each round opens the connections, and then begins all streams within 50 ms, with limits far from reached. A gateway with
the memory storage, one with SQLite and one with a real Redis stand before the same mock server, in interleaved rounds.
Prints for each storage how many streams were rejected, the time to the first chunk, and, for Redis, the commands per
request in a steady load. No stream may be rejected: the exit status is then 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import httptools
import uvloop

from benchmarks.gateway.load import KEY, payload, percentiles
from benchmarks.gateway.run import LOAD_CPU, ROOT, TARGET_CPU, apply, listening, machine, pinned
from benchmarks.gateway.run import Target as Gateway
from gateway.core.api_keys import hash_key
from tests.redis_server import RedisServer

BURST_SECONDS = 0.05
CHUNKS = 16
PACE = 20  # chunks per second
STEADY = ["--requests", "2000", "--concurrency", "16"]
POLICY = """
deployments:
  - {{name: mock, provider: openai, base_url: "http://127.0.0.1:{port}/v1", model: mock, max_concurrency: 4096,
     price: {{input: 0.10, output: 0.40}}}}
models:
  - {{name: mock, deployments: [mock]}}
tenants:
  - name: bench
    keys: [{{id: bench, hash: "{key_hash}"}}]
    limits: {{requests: 100M/1m, tokens: 100G/1m, concurrency: 10000, budget: {{amount: 1000000, per: month}}}}
"""


@dataclass
class Burst:
    """What became of the streams of one burst."""

    ttft_seconds: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class Stream(asyncio.Protocol):
    """One connection, and the stream that is begun on it."""

    def __init__(self, burst: Burst, ended: asyncio.Future[None]) -> None:
        self._burst = burst
        self._ended = ended
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def begin(self, request: bytes) -> None:
        self._sent = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        if not self._body and self._parser.get_status_code() == 200:
            self._burst.ttft_seconds.append(time.perf_counter() - self._sent)
        self._body.append(data)

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        if self._parser.get_status_code() != 200 or not body.endswith(b"data: [DONE]\n\n"):
            self._burst.failed.append(f"status {self._parser.get_status_code()}: {body[:160]!r}")
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


async def burst(port: int, streams: int) -> dict[str, Any]:
    """Begin all streams within `BURST_SECONDS`, and wait for their ends."""
    loop, result = asyncio.get_running_loop(), Burst()
    options = argparse.Namespace(model="mock", chunks=CHUNKS, pace=PACE, key=KEY, header=[])
    request, ends, protocols = payload(options), [], []
    for _ in range(streams):
        ended = loop.create_future()
        _, protocol = await loop.create_connection(partial(Stream, result, ended), "127.0.0.1", port)
        ends.append(ended)
        protocols.append(protocol)
    began = loop.time()
    for number, protocol in enumerate(protocols):
        protocol.begin(request)
        if loop.time() < began + BURST_SECONDS * number / streams:
            await asyncio.sleep(0)
    await asyncio.gather(*ends)
    return {"failed": len(result.failed), "why": result.failed[:3], "ttft_ms": percentiles(result.ttft_seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a file for the result")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)  # of one burst, for the load's process
    options = parser.parse_args()
    if options.port is not None:
        print(json.dumps(uvloop.run(burst(options.port, options.streams))))
        return
    result = measure(options.streams, options.rounds)
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if any(each["failed"] for each in result["storages"].values()):
        sys.exit("streams were rejected")


def measure(streams: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as running:
        folder = Path(name)
        server = RedisServer(folder, durable=True)
        server.start()
        running.callback(server.stop)
        mock_port = running.enter_context(listening(LOAD_CPU, "benchmarks.gateway.mock_server"))[1]
        policy = folder / "policy.yaml"
        policy.write_text(POLICY.format(port=mock_port, key_hash=hash_key(KEY, "")))
        gateways: dict[str, Gateway] = {}
        for storage, url in (
            ("memory", "memory://"), ("sqlite", f"sqlite:///{folder / 'state.db'}"), ("redis", server.url)
        ):  # fmt: skip
            settings = {"WARMPATH_STORAGE": url, "WARMPATH_DATA_DIR": str(folder / storage)}
            settings["WARMPATH_LOG_LEVEL"] = "warning"
            command = ["gateway", "serve", "--policy", str(policy), "--port", "0"]
            pid, port = running.enter_context(listening(TARGET_CPU, *command, env=settings))
            gateways[storage] = Gateway(storage, port, pid)
            apply(gateways[storage], ["--requests", "200", "--concurrency", "16"])
        bursts: dict[str, list[dict[str, Any]]] = {storage: [] for storage in gateways}
        for number in range(rounds):
            time.sleep(3.0)  # all slices are returned, so each burst begins without any
            for storage, each in gateways.items():
                bursts[storage].append(run_burst(each.port, streams))
                print(f"round {number + 1}: {storage}: {bursts[storage][-1]}", file=sys.stderr, flush=True)
        steady = {storage: apply(each, STEADY) for storage, each in gateways.items() if storage != "redis"}
        with server.client() as client:
            before = client.info("commandstats")
            steady["redis"] = apply(gateways["redis"], STEADY)
            after = client.info("commandstats")
    commands = {
        name.removeprefix("cmdstat_"): int(stats["calls"] - before.get(name, {"calls": 0})["calls"])
        for name, stats in after.items()
    }
    from_clients = sum(commands.get(name, 0) for name in ("evalsha", "eval", "xread", "xadd", "get"))
    return {
        "machine": machine(),
        "streams": streams,
        "storages": {storage: summary(results) for storage, results in bursts.items()},
        "steady_cpu_ms_per_request": {storage: each["cpu_ms_per_request"] for storage, each in steady.items()},
        "redis_scripts_per_request": commands.get("evalsha", 0) / steady["redis"]["requests"],
        "redis_commands_of_clients_per_request": from_clients / steady["redis"]["requests"],
    }


def run_burst(port: int, streams: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gateway.burst", "--port", str(port), "--streams", str(streams)]
    done = subprocess.run(pinned(LOAD_CPU, command), cwd=ROOT, stdout=subprocess.PIPE, timeout=120, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "failed": sum(each["failed"] for each in results),
        **{f"ttft_{p}_ms": statistics.median(each["ttft_ms"][p] for each in results) for p in ("p50", "p99")},
    }


if __name__ == "__main__":
    main()
