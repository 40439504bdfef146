"""Latency cost of a batch for the real-time calls beside it, on one bundled engine: `python -m benchmarks.batch`.

Rounds alternate between the two sides. On one side the gateway works through a batch of LINES / ROUNDS lines, from the
upload to the end, beside real-time traffic. On the other side the same traffic runs alone for as long. Many short
rounds spread the disturbance by other processes evenly over both sides. The traffic is streams that arrive as a Poisson
process, each with its own prompt. The figure is the time to the first token at the client. Engine, gateway, SQLite and
the load generator share the machine's CPUs. The percentiles of one side are over the times of all its rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
import yaml

from benchmarks.gateway.run import machine
from benchmarks.warm_paths.stack import running
from gateway.core.api_keys import hash_key

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
KEY = "wp-bench-0123456789abcdef"
MODEL = "warmpath-demo"
POLL_SECONDS = 0.1
WARM_UP_SECONDS = 5.0
PERCENTILES = ("p50", "p90", "p99")
TIMEOUT_SECONDS = 120.0
WORDS = [
    "cache",
    "token",
    "batch",
    "queue",
    "block",
    "prefix",
    "engine",
    "router",
    "ledger",
    "stream",
    "model",
    "policy",
    "tenant",
    "budget",
    "layer",
    "head",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--concurrency", type=int, default=2, help="lines in flight")
    parser.add_argument("--rate", type=float, default=5.0, help="real-time calls per second")
    parser.add_argument("--prompt-words", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=8, help="length of a real-time answer")
    parser.add_argument("--line-tokens", type=int, default=1, help="length of the answer to a line")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no further round after this time")
    parser.add_argument("--out", type=Path, help="the file for the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = asyncio.run(measure(options, Path(folder)))
    print(json.dumps(measured["summary"], indent=1))
    save(options, measured)


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    engine = [sys.executable, "-m", "backend", "--model", "demo", "--port", "0", "--num-threads", "1"]
    engine.append("--wait-for-kernels")
    with running(engine, folder / "engine", r"engine ready on (\S+) model") as engine_url:
        policy = folder / "policy.yaml"
        policy.write_text(yaml.safe_dump(policy_for(engine_url, options.concurrency)))
        gateway = [sys.executable, "-m", "gateway", "serve", "--policy", str(policy), "--port", "0"]
        with running(gateway, folder / "gateway", r"warmpath ready on (\S+) policy", WARMPATH_REPLICA="bench") as url:
            async with client_of(url) as client:
                return await rounds(client, options)


def policy_for(engine_url: str, concurrency: int) -> dict[str, Any]:
    return {
        "deployments": [
            {"name": "engine", "provider": "warmpath", "base_url": f"{engine_url}/v1", "model": MODEL},
        ],
        "models": [{"name": MODEL, "deployments": ["engine"]}],
        "batches": {"concurrency": concurrency},
        "tenants": [{"name": "bench", "keys": [{"id": "bench", "hash": hash_key(KEY, "")}]}],
    }


def client_of(url: str) -> httpx2.AsyncClient:
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx2.AsyncClient(base_url=f"{url}/v1", headers=headers, timeout=TIMEOUT_SECONDS)


async def rounds(client: httpx2.AsyncClient, options: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(5)
    await traffic(client, options, chance, asyncio.create_task(asyncio.sleep(WARM_UP_SECONDS)))
    alone: list[float] = []
    beside: list[float] = []
    batches: list[dict[str, Any]] = []
    end = time.monotonic() + 60 * options.minutes
    for number in range(options.rounds):
        if time.monotonic() > end:
            break
        began = time.monotonic()
        batch = asyncio.create_task(run_batch(client, options.lines // options.rounds, options.line_tokens, number))
        beside += await traffic(client, options, chance, batch)
        batches.append({**batch.result(), "seconds": time.monotonic() - began})
        quiet = asyncio.create_task(asyncio.sleep(batches[-1]["seconds"]))
        alone += await traffic(client, options, chance, quiet)
        if number % 10 == 9:
            print(f"{number + 1} rounds: alone {percentiles(alone)}, beside {percentiles(beside)}", file=sys.stderr)
    both = {"alone": percentiles(alone), "beside": percentiles(beside)}
    seconds = sum(batch["seconds"] for batch in batches)
    return {
        "summary": {
            **both,
            **{f"ratio_{p}": round(both["beside"][f"{p}_ms"] / both["alone"][f"{p}_ms"], 3) for p in PERCENTILES},
            "lines": sum(batch["completed"] for batch in batches),
            "lines_failed": sum(batch["failed"] for batch in batches),
            "lines_per_second": round(sum(batch["completed"] for batch in batches) / seconds, 1),
        },
        "batch_seconds": [round(batch["seconds"], 2) for batch in batches],
        "alone_ms": [round(each * 1000, 1) for each in alone],
        "beside_ms": [round(each * 1000, 1) for each in beside],
    }


async def traffic(
    client: httpx2.AsyncClient, options: argparse.Namespace, chance: random.Random, until: asyncio.Task[Any]
) -> list[float]:
    """Run real-time calls until the task is done. Returns the seconds to the first token of each."""
    calls: list[asyncio.Task[float]] = []
    due = time.monotonic()
    while not until.done():
        due += chance.expovariate(options.rate)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        prompt = " ".join(chance.choices(WORDS, k=options.prompt_words))
        calls.append(asyncio.create_task(first_token_seconds(client, prompt, options.max_tokens)))
    return await asyncio.gather(*calls)


async def first_token_seconds(client: httpx2.AsyncClient, prompt: str, max_tokens: int) -> float:
    message = {"role": "user", "content": prompt}
    body = {"model": MODEL, "messages": [message], "stream": True, "max_tokens": max_tokens, "ignore_eos": True}
    began, first = time.monotonic(), 0.0
    async with client.stream("POST", "chat/completions", json=body) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"a real-time call failed with status {reply.status_code}: {await reply.aread()!r}")
        async for line in reply.aiter_lines():
            if not first and '"content":"' in line and '"content":""' not in line:
                first = time.monotonic() - began
    return first or time.monotonic() - began


async def run_batch(client: httpx2.AsyncClient, lines: int, line_tokens: int, number: int) -> dict[str, Any]:
    url = "/v1/chat/completions"
    bodies = (
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Say {number} and {line}."}],
            "max_tokens": line_tokens,
            "ignore_eos": True,
        }
        for line in range(lines)
    )
    rows = [
        json.dumps({"custom_id": str(line), "method": "POST", "url": url, "body": body})
        for line, body in enumerate(bodies)
    ]
    file = {"file": ("lines.jsonl", "\n".join(rows).encode())}
    uploaded = (await client.post("files", data={"purpose": "batch"}, files=file)).json()
    asked = {"input_file_id": uploaded["id"], "endpoint": url, "completion_window": "24h"}
    batch = (await client.post("batches", json=asked)).json()
    while batch["status"] not in ("completed", "failed", "expired"):
        await asyncio.sleep(POLL_SECONDS)
        batch = (await client.get(f"batches/{batch['id']}")).json()
    counts: dict[str, Any] = batch["request_counts"]
    return counts


def percentiles(seconds: list[float]) -> dict[str, Any]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"calls": len(seconds), **{f"{p}_ms": round(cuts[int(p[1:]) - 1] * 1000, 2) for p in PERCENTILES}}


def save(options: argparse.Namespace, measured: dict[str, Any]) -> None:
    now = datetime.datetime.now(datetime.UTC)
    shown = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    commit = shown.stdout.strip() or "unknown"
    path: Path = options.out or RESULTS / f"batch-{now:%Y-%m-%d}-{commit}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    given = {name: value for name, value in vars(options).items() if name != "out"}
    about = {"when": now.isoformat(timespec="seconds"), "commit": commit, "machine": machine(), "options": given}
    path.write_text(json.dumps({**about, **measured}) + "\n")


if __name__ == "__main__":
    main()
