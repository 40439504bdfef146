"""Memory of one gateway process under many clients, and their latency cost for others: `python -m benchmarks.crowds`.

Crowds of clients arrive one after the other and stay: idle connections, slow writers of heads and bodies that never
end, slow readers of long streams, prompts of 1 MB, and many streams at once. Beside each crowd, a normal client sends
requests for short streams, one after the other. Its time to first token is compared with that before the first crowd.
All processes run on one machine, and the crowds' process shares its CPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop
import yaml

from benchmarks.gateway.run import cpu_seconds, listening, machine, resident_mib
from benchmarks.open_loop import Clients, payload, percentiles_ms
from gateway.core.api_keys import hash_key

RESULTS = Path(__file__).parent / "results"
KEY = "wp-bench-0123456789abcdef"
MEBIBYTE = 2**20
PROBES = 200
CONNECTING_AT_ONCE = 200
QUIET_SECONDS, QUIET_CPU_SHARE = 0.5, 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--slow-writers", type=int, default=500, help="half stop in the head, half in the body")
    parser.add_argument("--slow-readers", type=int, default=500)
    parser.add_argument("--large-prompts", type=int, default=300, help="of 1 MB each, all at once")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="the file for the result")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with (
        tempfile.TemporaryDirectory() as folder,
        listening(1, "benchmarks.gateway.mock_server") as (_, mock_port),
        listening(1, "benchmarks.gateway.mock_server") as (_, flood_port),  # upstream of the slow readers
    ):
        policy = Path(folder) / "policy.yaml"
        policy.write_text(yaml.safe_dump(policy_for(mock_port, flood_port)))
        settings = {"WARMPATH_DATA_DIR": f"{folder}/data", "WARMPATH_LOG_LEVEL": "error"}
        with listening(0, "gateway", "serve", "--policy", str(policy), "--port", "0", env=settings) as (pid, port):
            stages = uvloop.run(Crowds(options, pid, port).all())
    print(text_of(stages))
    save(options, stages)


def policy_for(port: int, flood_port: int) -> dict[str, Any]:
    ports = {"mock": port, "flood": flood_port}
    return {
        "deployments": [
            {"name": name, "base_url": f"http://127.0.0.1:{each}/v1", "model": "mock", "max_concurrency": 4000}
            for name, each in ports.items()
        ],
        "models": [{"name": name, "deployments": [name]} for name in ports],
        "cache": {"scope": "off"},
        "tenants": [{"name": "bench", "keys": [{"id": "bench", "hash": hash_key(KEY, "")}]}],
    }


def stream_of(tokens: int, pace: int | None, prompt: str = "Hi", model: str = "mock") -> bytes:
    body = {"model": model, "stream": True, "max_tokens": tokens, "user": f"paced-{pace}" if pace else "unpaced"}
    return payload(KEY, {**body, "messages": [{"role": "user", "content": prompt}]})


class Crowds:
    """The crowds, in the order in which they arrive, and the normal client beside them."""

    def __init__(self, options: argparse.Namespace, pid: int, port: int) -> None:
        self._options = options
        self._pid = pid
        self._port = port
        self._normal_client = Clients(port)
        self._held: list[object] = []  # connections that stay open
        self._connecting = asyncio.Semaphore(CONNECTING_AT_ONCE)

    async def all(self) -> list[dict[str, Any]]:
        options = self._options
        await self._probe()
        return [
            await self._stage("no crowd", self._no_crowd),
            await self._stage(f"{options.idle} idle connections", self._idle),
            await self._stage(f"{options.slow_writers} slow writers", self._slow_writers),
            await self._stage(f"{options.slow_readers} slow readers", self._slow_readers),
            await self._stage(f"{options.large_prompts} prompts of 1 MB", self._large_prompts),
            await self._stage(f"{options.streams} streams at once", self._streams),
        ]

    async def _stage(self, name: str, crowd: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        more = await crowd()
        stage = {
            "crowd": name,
            **more,
            "polite_ttft_ms": await self._probe(),
            "rss_mib": round(resident_mib(self._pid)),
        }
        print(json.dumps(stage), file=sys.stderr, flush=True)
        return stage

    async def _probe(self) -> dict[str, float]:
        calls = [await self._normal_client.send("polite", stream_of(4, 200)) for _ in range(PROBES)]
        if failed := [call.status for call in calls if not call.complete]:
            raise SystemExit(f"{len(failed)} of {PROBES} calls of the normal client failed: {failed[:5]}")
        return percentiles_ms([call.first for call in calls if call.first is not None])

    async def _no_crowd(self) -> dict[str, Any]:
        return {}

    async def _connect(self, sends: bytes = b"") -> asyncio.StreamReader:
        async with self._connecting:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(sends)
            await writer.drain()
        self._held += [reader, writer]
        return reader

    async def _idle(self) -> dict[str, Any]:
        await asyncio.gather(*[self._connect() for _ in range(self._options.idle)])
        return {}

    async def _slow_writers(self) -> dict[str, Any]:
        whole = stream_of(4, None)
        beginnings = [whole[:100], whole.replace(b"content-length: ", b"content-length: 9999")]  # a head; a body
        pairs = self._options.slow_writers // 2
        await asyncio.gather(*[self._connect(begun) for begun in beginnings * pairs])
        return {}

    async def _slow_readers(self) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        for _ in range(self._options.slow_readers):
            client = socket.socket()
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await loop.sock_connect(client, ("127.0.0.1", self._port))
            await loop.sock_sendall(client, stream_of(4_000, None, model="flood"))  # 1 MB
            self._held.append(client)
        return {"seconds_until_quiet": await self._wait_until_quiet()}

    async def _wait_until_quiet(self) -> float:
        """Wait until the slow readers' buffers are full, which ends the gateway's work on their streams.

        Without this, the normal client would be measured beside busy streams instead of stalled ones. Returns the
        seconds that it took.
        """
        began, before, now = time.monotonic(), 0.0, cpu_seconds(self._pid)
        while now - before > QUIET_CPU_SHARE * QUIET_SECONDS:
            await asyncio.sleep(QUIET_SECONDS)
            before, now = now, cpu_seconds(self._pid)
        return round(time.monotonic() - began, 1)

    async def _large_prompts(self) -> dict[str, Any]:
        large = stream_of(600, 20, "word " * (MEBIBYTE // 5))

        async def status() -> bytes:
            return (await (await self._connect(large)).readline()).split()[1]

        statuses = await asyncio.gather(*[status() for _ in range(self._options.large_prompts)])
        return {"statuses": {each.decode(): statuses.count(each) for each in sorted(set(statuses))}}

    async def _streams(self) -> dict[str, Any]:
        clients = Clients(self._port)
        tasks = [asyncio.create_task(clients.send("stream", stream_of(400, 10))) for _ in range(self._options.streams)]
        polite = await self._probe()
        in_flight = sum(not task.done() for task in tasks)
        calls = await asyncio.gather(*tasks)
        clients.close()
        return {
            "beside_them_ttft_ms": polite,
            "under_way_meanwhile": in_flight,
            "answered_whole": sum(call.complete for call in calls),
            "ttft_ms": percentiles_ms([call.first for call in calls if call.first is not None]),
        }


def text_of(stages: list[dict[str, Any]]) -> str:
    lines = [f"{'crowd, beside earlier ones':32} {'RSS MiB':>8} {'normal TTFT p50':>16} {'p99 ms':>8}"]
    for stage in stages:
        polite = stage.get("beside_them_ttft_ms", stage["polite_ttft_ms"])
        more = {name: stage[name] for name in ("statuses", "under_way_meanwhile", "answered_whole") if name in stage}
        line = f"{stage['crowd']:32} {stage['rss_mib']:8} {polite['p50']:16.1f} {polite['p99']:8.1f}"
        lines.append(f"{line}  {more or ''}".rstrip())
    return "\n".join(lines)


def save(options: argparse.Namespace, stages: list[dict[str, Any]]) -> None:
    now = datetime.datetime.now(datetime.UTC)
    path: Path = options.out or RESULTS / f"crowds-{now:%Y-%m-%d}.json"
    given = {name: value for name, value in vars(options).items() if name != "out"}
    about = {"when": now.isoformat(timespec="seconds"), "machine": machine(), "options": given}
    path.write_text(json.dumps({**about, "stages": stages}, indent=1) + "\n")
    path.with_suffix(".txt").write_text(text_of(stages) + "\n")


if __name__ == "__main__":
    main()
