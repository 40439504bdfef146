"""Cost of the gateway between a client and a fast upstream: `python -m benchmarks.gateway.run`, or `make bench`.

Every target stands between the same load generator and the same mock server. The target has CPU 0 for itself, mock and
load generator share CPU 1. Rounds are interleaved and medians are taken, so that other processes disturb all targets
equally. On a busy machine, trust the CPU time of the target's process tree (from /proc/PID/task/*/schedstat, in
nanoseconds) and not the latencies. All phases of the gateway are on: keys, limits, budget, cache, ledger, metrics, and
10 % of the requests are traced and exported over OTLP to the mock.

The targets: `direct`, without a target; `bare`, which passes bytes on without parsing HTTP and is the lower bound for
Python; `warmpath`; and `litellm`, if `--litellm-python` names an interpreter that has it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gateway.load import KEY
from gateway.core import interpreter
from gateway.core.api_keys import hash_key

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
TARGET_CPU, LOAD_CPU = 0, 1
START_TIMEOUT_SECONDS = 60.0
LOAD_TIMEOUT_SECONDS = 300.0
CHUNKS = 64  # content chunks of a stream

# name -> (arguments of load.py, requests for the slow target, which would take minutes for the full number)
LOADS = {
    "json, 16 at once": (["--requests", "3000", "--concurrency", "16"], 300),
    "json, one by one": (["--requests", "500", "--concurrency", "1"], 50),
    "64 streams, 50 chunks/s": (
        ["--requests", "192", "--concurrency", "64", "--chunks", str(CHUNKS), "--pace", "50"],
        64,
    ),
}
WARM_UP = [["--requests", "200", "--concurrency", "16"], ["--requests", "64", "--concurrency", "64", "--chunks", "8"]]

POLICY = """
deployments:
  - name: mock
    provider: {provider}
    base_url: http://127.0.0.1:{port}/v1
    model: mock
    max_concurrency: 256
    price: {{input: 0.10, cached_input: 0.01, output: 0.40}}
models:
  - {{name: mock, deployments: [mock]}}
rules:
  - {{match: {{service_tier: flex}}, class: batch}}
tracing: {{sample: {sample}}}
tenants:
  - name: bench
    keys: [{{id: bench, hash: "{key_hash}"}}]
    limits: {{requests: 100M/1m, tokens: 100G/1m, concurrency: 1000, budget: {{amount: 1000000, per: month}}}}
"""

LITELLM_CONFIG = """
model_list:
  - model_name: mock
    litellm_params: {{model: openai/mock, api_base: "http://127.0.0.1:{port}/v1", api_key: none}}
general_settings: {{master_key: "{key}"}}
litellm_settings: {{telemetry: false}}
"""


@dataclass(frozen=True)
class Target:
    name: str
    port: int
    pid: int | None  # None: direct, without a process to measure
    headers: tuple[str, ...] = ()  # that its requests need, besides the key


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        mock_port = running.enter_context(listening(LOAD_CPU, "benchmarks.gateway.mock_server"))[1]
        targets = [Target("direct", mock_port, None)]
        targets += start_targets(running, options, mock_port, Path(folder))
        for target in targets:
            for load in WARM_UP:
                apply(target, load)
        measured: dict[str, dict[str, list[dict[str, Any]]]] = {t.name: {name: [] for name in LOADS} for t in targets}
        for round_number in range(options.rounds):
            for target in targets:
                for name, (load, slow_requests) in LOADS.items():
                    few = ["--requests", str(slow_requests)] if target.name == "litellm" else []
                    measured[target.name][name].append(apply(target, load + few))
                print(f"round {round_number + 1} of {options.rounds}: {target.name}", file=sys.stderr, flush=True)
        memory = {t.name: resident_mib(t.pid) for t in targets if t.pid is not None}
    summary = {name: {load: median(results) for load, results in loads.items()} for name, loads in measured.items()}
    print(table(summary, memory))
    path = save(options, summary, memory, measured)
    print(f"\nresult written to {path}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--provider", default="vllm", help="the dialect of the deployment in the gateway's policy")
    parser.add_argument("--litellm-python", help="an interpreter that can import litellm[proxy]")
    parser.add_argument(
        "--out", type=Path, help="the file for the result (default: one in results/, named by date and commit)"
    )
    return parser.parse_args()


def start_targets(
    running: contextlib.ExitStack, options: argparse.Namespace, mock_port: int, folder: Path
) -> Iterator[Target]:
    pid, port = running.enter_context(listening(TARGET_CPU, "benchmarks.gateway.bare_relay", str(mock_port)))
    yield Target("bare", port, pid)

    policy = folder / "policy.yaml"
    policy.write_text(
        POLICY.format(provider=options.provider, port=mock_port, key_hash=hash_key(KEY, ""), sample="10%")
    )
    settings = {
        "WARMPATH_DATA_DIR": str(folder / "data"),
        "WARMPATH_OTLP_ENDPOINT": f"http://127.0.0.1:{mock_port}",
        "WARMPATH_LOG_LEVEL": "warning",
    }
    command = ["gateway", "serve", "--policy", str(policy), "--port", "0"]
    pid, port = running.enter_context(listening(TARGET_CPU, *command, env=settings))
    yield Target("warmpath", port, pid)

    if options.litellm_python:
        config = folder / "litellm.yaml"
        config.write_text(LITELLM_CONFIG.format(port=mock_port, key=KEY))
        port = free_port()
        litellm = Path(options.litellm_python).with_name("litellm")
        arguments = [str(litellm), "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
        process = running.enter_context(spawned(TARGET_CPU, arguments))
        wait_until_answered(f"http://127.0.0.1:{port}/health/liveliness")
        yield Target("litellm", port, process.pid)


@contextlib.contextmanager
def listening(cpu: int, module: str, *arguments: str, env: dict[str, str] | None = None) -> Iterator[tuple[int, int]]:
    """Run a module until the end of the block. Yields its process id and the port that its first line names."""
    with spawned(cpu, [sys.executable, "-m", module, *arguments], env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        if (port := re.search(r"(?:listening on |:)(\d+)\b", line)) is None:
            raise SystemExit(f"{module} did not start: {line!r}")
        yield process.pid, int(port[1])


@contextlib.contextmanager
def spawned(
    cpu: int, command: list[str], env: dict[str, str] | None = None, stdout: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(pinned(cpu, command), cwd=ROOT, env={**os.environ, **(env or {})}, stdout=stdout)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def pinned(cpu: int, command: list[str]) -> list[str]:
    """The command, pinned to one CPU if the machine has enough of them."""
    return ["taskset", "-c", str(cpu), *command] if len(os.sched_getaffinity(0)) > 1 else command


def wait_until_answered(url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        try:
            urllib.request.urlopen(url, timeout=1).close()
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            if time.monotonic() > deadline:
                raise SystemExit(f"no server answers at {url}") from None
            time.sleep(0.2)
        else:
            return


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def apply(target: Target, load: list[str]) -> dict[str, Any]:
    """Apply one load to one target. The result includes the CPU seconds that the target used."""
    command = [sys.executable, "-m", "benchmarks.gateway.load", str(target.port), "--key", KEY, *load]
    command += [f"--header={line}" for line in target.headers]
    before = cpu_seconds(target.pid)
    done = subprocess.run(
        pinned(LOAD_CPU, command), cwd=ROOT, stdout=subprocess.PIPE, timeout=LOAD_TIMEOUT_SECONDS, check=True
    )
    spent = cpu_seconds(target.pid) - before
    result: dict[str, Any] = json.loads(done.stdout)
    if result["failed"]:
        raise SystemExit(f"{target.name}: {result['failed']}")
    return {**result, "cpu_ms_per_request": spent * 1000 / result["requests"]}


def process_tree(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(descendant for child in children for descendant in process_tree(int(child)))]


def cpu_seconds(pid: int | None) -> float:
    if pid is None:
        return 0.0
    threads = [task for p in process_tree(pid) for task in Path(f"/proc/{p}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in threads) / 1e9


def resident_mib(pid: int) -> float:
    status = "".join(Path(f"/proc/{p}/status").read_text() for p in process_tree(pid))
    return sum(int(kib) for kib in re.findall(r"VmRSS:\s*(\d+)", status)) / 1024


def median(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The median over the rounds, field by field."""
    return {
        "cpu_ms_per_request": statistics.median(r["cpu_ms_per_request"] for r in results),
        "requests_per_second": statistics.median(r["requests_per_second"] for r in results),
        **{
            f"{what}_{p}_ms": statistics.median(r[f"{what}_ms"][p] for r in results)
            for what in ("ttft", "total")
            for p in ("p50", "p99")
        },
    }


def table(summary: dict[str, dict[str, Any]], memory: dict[str, float]) -> str:
    many, single, streams = LOADS
    direct = summary["direct"]
    lines = [
        f"{'':10} {'JSON, 16 at once':>27}   {'JSON, one by one':>21}   {'64 streams, 50 chunks/s':>36}   {'':>7}",
        f"{'':10} {'CPU s/1000':>11} {'ratio':>6} {'req/s':>8}   {'added p50':>10} {'p99 ms':>10}"
        f"   {'CPU us/chunk':>13} {'ratio':>6} {'ttft p50':>8} {'p99':>6}   {'RSS MiB':>7}",
    ]
    for name, loads in summary.items():
        json_cpu, stream_cpu = loads[many]["cpu_ms_per_request"], loads[streams]["cpu_ms_per_request"]
        bare = summary["bare"]
        ratios = (json_cpu / bare[many]["cpu_ms_per_request"], stream_cpu / bare[streams]["cpu_ms_per_request"])
        added = [loads[single][f"total_{p}_ms"] - direct[single][f"total_{p}_ms"] for p in ("p50", "p99")]
        lines.append(
            f"{name:10} {json_cpu:11.3f} {ratios[0]:6.1f} {loads[many]['requests_per_second']:8.0f}"
            f"   {added[0]:10.3f} {added[1]:10.3f}   {stream_cpu * 1000 / CHUNKS:13.1f} {ratios[1]:6.1f}"
            f" {loads[streams]['ttft_p50_ms']:8.1f} {loads[streams]['ttft_p99_ms']:6.1f}   {memory.get(name, 0):7.0f}"
        )
    return "\n".join(lines)


def save(options: argparse.Namespace, summary: Any, memory: dict[str, float], measured: Any) -> Path:
    now = datetime.datetime.now(datetime.UTC)
    commit = _output("git", "rev-parse", "--short", "HEAD")
    path: Path = options.out or RESULTS / f"{now:%Y-%m-%d}-{commit}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "when": now.isoformat(timespec="seconds"),
        "commit": commit + ("+" if _output("git", "status", "--porcelain", "--untracked-files=no", "gateway") else ""),
        "machine": machine(),
        "rounds": options.rounds,
        "provider": options.provider,
    }
    path.write_text(json.dumps({**about, "median": summary, "rss_mib": memory, "all": measured}, indent=1) + "\n")
    return path.resolve()


def machine() -> dict[str, Any]:
    names = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": names[0] if names else platform.machine(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": interpreter.describe(),
    }


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
