"""Warmpath beside other gateways, with the bounds that it must keep: `python -m benchmarks.gateway.peers`.

Load generator, mock server, pinning and measuring are those of `run.py`: each target has one core, rounds are
interleaved, every answer is checked, and the medians of the rounds count. Warmpath runs with all phases on (keys,
limits, a budget, prices, ledger, metrics, prefix routing), with each storage, and with every request traced and
exported ("otlp"). The peers:

* nginx, as a pass-through proxy (Debian's package `nginx-light`);
* vllm-router and sglang-router with their cache-aware policies (the PyPI packages of these names);
* Portkey (the npm package `@portkey-ai/gateway`) and LiteLLM (the PyPI package `litellm[proxy]`), if they are named.

A peer that is not installed is omitted, and so is a target if one of its requests fails; the output says so.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gateway.load import KEY
from benchmarks.gateway.run import (
    LITELLM_CONFIG,
    LOAD_CPU,
    POLICY,
    TARGET_CPU,
    WARM_UP,
    Target,
    apply,
    free_port,
    listening,
    machine,
    median,
    resident_mib,
    spawned,
    wait_until_answered,
)
from gateway.core.api_keys import hash_key

CHUNKS = 64
JSON, SINGLE, STREAMS, PACED = "JSON, 16 at once", "JSON, one by one", "streams, 16 at once", "64 paced streams"
LOADS = {
    JSON: ["--requests", "2000", "--concurrency", "16"],
    SINGLE: ["--requests", "300", "--concurrency", "1"],
    STREAMS: ["--requests", "200", "--concurrency", "16", "--chunks", str(CHUNKS)],
    PACED: ["--requests", "64", "--concurrency", "64", "--chunks", str(CHUNKS), "--pace", "50"],
}
# Slices of limits are leased in the first load. The second one follows at once, and is the steady state.
STEADY = (["--requests", "2000", "--concurrency", "16"], ["--requests", "10000", "--concurrency", "16"])
SLOW = {"litellm", "portkey"}  # these get a tenth of the requests, since the full number would take minutes
MEMORY, OTLP, SQLITE, SQLITE_OTLP, REDIS = "memory", "memory, otlp", "sqlite", "sqlite, otlp", "redis"

NGINX_CONFIG = """
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/nginx-error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  keepalive_requests 1000000;
  upstream mock {{ server 127.0.0.1:{mock}; keepalive 256; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=1024;
    location / {{
      proxy_pass http://mock; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


@dataclass(frozen=True)
class Must:
    """One bound: a ratio of two medians, or a figure by itself."""

    line: str
    value: Callable[[Figures], float]
    bound: float


class Figures:
    """The medians of all targets. A figure whose target was omitted raises `KeyError`."""

    def __init__(self, medians: dict[str, dict[str, dict[str, Any]]], other: dict[str, float]) -> None:
        self._medians = medians
        self._other = other

    def cpu(self, target: str, load: str) -> float:
        return float(self._medians[target][load]["cpu_ms_per_request"])

    def cpu_ratio(self, load: str, target: str, peer: str) -> float:
        return self.cpu(target, load) / self.cpu(peer, load)

    def added_ratio(self, target: str, peer: str) -> float:
        direct, ours, theirs = (self._medians[name][SINGLE]["total_p50_ms"] for name in ("direct", target, peer))
        return float((ours - direct) / (theirs - direct))

    def ttft_ratio(self, target: str, peer: str) -> float:
        return float(self._medians[target][PACED]["ttft_p50_ms"] / self._medians[peer][PACED]["ttft_p50_ms"])

    def other(self, name: str) -> float:
        return self._other[name]


MUSTS = (
    Must("JSON: CPU, memory / vllm-router", lambda f: f.cpu_ratio(JSON, MEMORY, "vllm-router"), 1.5),
    Must("JSON: CPU, memory with OTLP / vllm-router", lambda f: f.cpu_ratio(JSON, OTLP, "vllm-router"), 1.8),
    Must("JSON: CPU, SQLite / memory", lambda f: f.cpu_ratio(JSON, SQLITE, MEMORY), 1.25),
    Must("JSON: CPU, Redis / memory", lambda f: f.cpu_ratio(JSON, REDIS, MEMORY), 1.25),
    Must("streams: CPU, memory / vllm-router", lambda f: f.cpu_ratio(STREAMS, MEMORY, "vllm-router"), 1.2),
    Must("paced streams: CPU, memory / vllm-router", lambda f: f.cpu_ratio(PACED, MEMORY, "vllm-router"), 1.2),
    Must("paced streams: CPU, memory / nginx", lambda f: f.cpu_ratio(PACED, MEMORY, "nginx"), 2.0),
    Must("one by one: added p50, memory / vllm-router", lambda f: f.added_ratio(MEMORY, "vllm-router"), 1.5),
    Must("64 streams at once: TTFT p50, memory / vllm-router", lambda f: f.ttft_ratio(MEMORY, "vllm-router"), 3.0),
    Must("Redis: commands a request", lambda f: f.other("redis commands a request"), 0.1),
    Must("RSS with memory storage, MiB", lambda f: f.other("rss"), 90.0),
)


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        mock_port = running.enter_context(listening(LOAD_CPU, "benchmarks.gateway.mock_server"))[1]
        redis_port = start_redis(running) if shutil.which("redis-server") else None
        targets = [Target("direct", mock_port, None)]
        targets += start_warmpath(running, Path(folder), mock_port, redis_port)
        targets += start_peers(running, options, mock_port, Path(folder))
        for target in targets:
            for load in WARM_UP:
                apply(target, load)
        measured: dict[str, dict[str, list[dict[str, Any]]]] = {t.name: {name: [] for name in LOADS} for t in targets}
        for number in range(options.rounds):
            for target in targets[number % len(targets) :] + targets[: number % len(targets)]:
                if target.name not in measured:
                    continue
                try:
                    for name, results in measured[target.name].items():
                        load = LOADS[name]
                        results.append(apply(target, fewer(load) if target.name in SLOW else load))
                except SystemExit as failed:
                    print(f"{target.name}: omitted, since requests failed: {failed}", file=sys.stderr)
                    del measured[target.name]
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        memory = {t.name: resident_mib(t.pid) for t in targets if t.pid is not None}
        other = {"rss": memory[MEMORY], **steady_redis(targets, redis_port)}
    medians = {name: {load: median(results) for load, results in loads.items()} for name, loads in measured.items()}
    musts = check(Figures(medians, other))
    print(table(medians, memory), *("", *musts), sep="\n")
    if options.out is not None:
        about = {"machine": machine(), "rounds": options.rounds, "musts": musts}
        options.out.write_text(json.dumps({**about, "median": medians, "rss_mib": memory, **other}, indent=1) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-router", help="vllm-router's program", default=shutil.which("vllm-router"))
    parser.add_argument("--sglang-router", help="sglang-router's program", default=shutil.which("sglang-router"))
    parser.add_argument("--portkey", type=Path, help="build/start-server.js of the npm package @portkey-ai/gateway")
    parser.add_argument("--litellm-python", type=Path, help="an interpreter that can import litellm[proxy]")
    parser.add_argument("--out", type=Path, help="write the medians to this file, as JSON")
    return parser.parse_args()


def start_warmpath(
    running: contextlib.ExitStack, folder: Path, mock_port: int, redis_port: int | None
) -> Iterator[Target]:
    for name in (MEMORY, OTLP, SQLITE, SQLITE_OTLP, REDIS):
        own = folder / re.sub(r"\W+", "-", name)
        own.mkdir()
        storage = {"sqlite": f"sqlite:///{own}/storage.db", "redis": f"redis://127.0.0.1:{redis_port}"}
        if name == REDIS and redis_port is None:
            print(f"{name}: omitted, redis-server is not installed", file=sys.stderr)
            continue
        sample = "100%" if "otlp" in name else "0%"
        policy = own / "policy.yaml"
        policy.write_text(POLICY.format(provider="vllm", port=mock_port, key_hash=hash_key(KEY, ""), sample=sample))
        settings = {
            "WARMPATH_DATA_DIR": str(own / "data"),
            "WARMPATH_STORAGE": storage.get(name.partition(",")[0], "memory://"),
            "WARMPATH_LOG_LEVEL": "warning",
        }
        if "otlp" in name:
            settings["WARMPATH_OTLP_ENDPOINT"] = f"http://127.0.0.1:{mock_port}"
        command = ["gateway", "serve", "--policy", str(policy), "--port", "0"]
        pid, port = running.enter_context(listening(TARGET_CPU, *command, env=settings))
        yield Target(name, port, pid)


def start_peers(
    running: contextlib.ExitStack, options: argparse.Namespace, mock_port: int, folder: Path
) -> Iterator[Target]:
    """The peers that are installed. Prints why another one is omitted."""
    start = functools.partial(_start, running, folder)
    mock = f"http://127.0.0.1:{mock_port}"
    port = free_port()
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    config = folder / "nginx.conf"
    config.write_text(NGINX_CONFIG.format(folder=folder, mock=mock_port, port=port))
    yield from start("nginx", nginx, ["-c", str(config), "-e", f"{folder}/nginx-error.log"], port, "/v1/models")

    router = ["--worker-urls", mock, "--policy", "cache_aware", "--host", "127.0.0.1", "--port"]
    port = free_port()
    metrics = ["--prometheus-port", str(free_port())]
    yield from start("vllm-router", options.vllm_router, [*router, str(port), *metrics], port, "/health")
    port = free_port()
    metrics = ["--prometheus-port", str(free_port())]
    yield from start("sglang-router", options.sglang_router, ["launch", *router, str(port), *metrics], port, "/health")

    port = free_port()
    node = shutil.which("node") if options.portkey else None
    headers = ("x-portkey-provider: openai", f"x-portkey-custom-host: {mock}/v1")
    yield from start("portkey", node, [str(options.portkey), f"--port={port}", "--headless"], port, "/", headers)

    port = free_port()
    litellm_config = folder / "litellm.yaml"
    litellm_config.write_text(LITELLM_CONFIG.format(port=mock_port, key=KEY))
    litellm = str(options.litellm_python.with_name("litellm")) if options.litellm_python else None
    arguments = ["--config", str(litellm_config), "--port", str(port), "--host", "127.0.0.1"]
    yield from start("litellm", litellm, arguments, port, "/health/liveliness")


def _start(
    running: contextlib.ExitStack,
    folder: Path,
    name: str,
    program: str | None,
    arguments: list[str],
    port: int,
    path: str,
    headers: tuple[str, ...] = (),
) -> Iterator[Target]:
    if program is None:
        print(f"{name}: omitted, since it is not installed or not named by an option", file=sys.stderr)
        return
    process = running.enter_context(spawned(TARGET_CPU, [program, *arguments]))
    wait_until_answered(f"http://127.0.0.1:{port}{path}")
    yield Target(name, port, process.pid, headers)


def start_redis(running: contextlib.ExitStack) -> int:
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    running.enter_context(spawned(LOAD_CPU, command))
    while True:
        with contextlib.suppress(ConnectionError):
            redis_counters(port)
            return port


def steady_redis(targets: list[Target], port: int | None) -> dict[str, float]:
    """Commands and network reads of Redis per JSON request, in a load that has already lasted for a while."""
    target = next((each for each in targets if each.name == REDIS), None)
    if target is None or port is None:
        return {}
    begin, go_on = STEADY
    apply(target, begin)
    before = redis_counters(port)
    requests = apply(target, go_on)["requests"]
    commands, reads = (after - earlier for after, earlier in zip(redis_counters(port), before, strict=True))
    return {"redis commands a request": commands / requests, "redis reads a request": reads / requests}


def redis_counters(port: int) -> tuple[int, int]:
    """What Redis has processed: commands, those that scripts run included, and reads from connections."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(b"INFO stats\r\n")
        answer = b""
        while not answer.endswith(b"\r\n\r\n") or b"total_reads_processed" not in answer:
            answer += connection.recv(65536)
    counters = dict(re.findall(rb"(\w+):(\d+)\r\n", answer))
    return int(counters[b"total_commands_processed"]), int(counters[b"total_reads_processed"])


def fewer(load: list[str]) -> list[str]:
    at = load.index("--requests") + 1
    return [*load[:at], str(max(50, int(load[at]) // 10)), *load[at + 1 :]]


def check(figures: Figures) -> list[str]:
    """One line for each bound: the figure, the bound, and whether it is kept."""
    lines = []
    for must in MUSTS:
        try:
            value = must.value(figures)
        except KeyError as missing:
            lines.append(f"  ?  {must.line}: not measured, without {missing}")
        else:
            verdict = "ok " if value <= must.bound else "NOT"
            lines.append(f"{verdict}  {must.line}: {value:.2f} (at most {must.bound:g})")
    return lines


def table(medians: dict[str, dict[str, dict[str, Any]]], memory: dict[str, float]) -> str:
    direct = medians["direct"][SINGLE]["total_p50_ms"]
    lines = [
        f"{'':14} {'JSON 16':>10} {'streams 16':>11} {'paced':>9} {'one by one':>11} {'64 at once':>11} {'':>8}",
        f"{'':14} {'CPU s/1000':>10} {'CPU s/1000':>11} {'us/chunk':>9} {'p50 +ms':>11} {'TTFT p50 ms':>11}"
        f" {'RSS MiB':>8}",
    ]
    for name, loads in medians.items():
        lines.append(
            f"{name:14} {loads[JSON]['cpu_ms_per_request']:10.3f} {loads[STREAMS]['cpu_ms_per_request']:11.3f}"
            f" {loads[PACED]['cpu_ms_per_request'] * 1000 / CHUNKS:9.1f}"
            f" {loads[SINGLE]['total_p50_ms'] - direct:11.3f} {loads[PACED]['ttft_p50_ms']:11.1f}"
            f" {memory.get(name, 0):8.0f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
