"""Real-time calls beside background streams, with and without latency classes: `python -m benchmarks.mixed`.

One bundled engine with the demo model, behind the gateway. Three settings alternate, round after round, so that other
processes on the machine disturb them equally:

    alone         real-time calls only
    one class     beside `--background` streams, which are in the real-time class as well
    two classes   the same, but the streams request `service_tier: flex`, which the policy maps to class `batch`

Real-time calls arrive as a Poisson process, in an open loop, each with its own prompt. The figure is the time to first
token. When a background stream ends, another one starts. Their figure is tokens per second, over all of them. The plot
shows, for each setting, the share of calls that had their first token within a given time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop
import yaml

from benchmarks.gateway.run import machine
from benchmarks.open_loop import Clients, offered, payload, percentiles_ms
from benchmarks.warm_paths.stack import running
from gateway.core.api_keys import hash_key

RESULTS = Path(__file__).parent / "results"
KEY = "wp-bench-0123456789abcdef"
MODEL = "warmpath-demo"
SETTINGS = ("alone", "one class", "two classes")
COLOURS = {"alone": "#adb5bd", "one class": "#4c6ef5", "two classes": "#d9480f"}
REALTIME_WORDS, REALTIME_TOKENS = 60, 8
BACKGROUND_WORDS, BACKGROUND_TOKENS = 120, 48
SLOTS = 8  # of the deployment
WORDS = (
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
    "tenant",
)


@dataclass
class Measured:
    """Measurements of one setting, over all rounds."""

    first_seconds: list[float] = field(default_factory=list)
    refused: int = 0
    background_tokens: int = 0
    background_refused: int = 0
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        return {
            "calls": len(self.first_seconds),
            "ttft_ms": percentiles_ms(self.first_seconds),
            "refused": self.refused,
            "background_tokens_per_second": round(self.background_tokens / self.seconds, 1),
            "background_refused": self.background_refused,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of each setting in a round")
    parser.add_argument("--rate", type=float, default=3.0, help="real-time calls per second")
    parser.add_argument("--background", type=int, default=16, help="concurrent background streams")
    parser.add_argument("--out", type=Path, help="the file for the result; the plot is written beside it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, components(Path(folder)) as port:
        measured = uvloop.run(measure(options, port))
    save(options, measured)
    for name in SETTINGS:
        print(f"{name:12} {json.dumps(measured[name].summary())}")


@contextlib.contextmanager
def components(folder: Path) -> Iterator[int]:
    engine = [sys.executable, "-m", "backend", "--model", "demo", "--port", "0", "--num-threads", "1"]
    engine.append("--wait-for-kernels")
    with running(engine, folder / "engine", r"engine ready on (\S+) model") as url:
        policy = folder / "policy.yaml"
        policy.write_text(yaml.safe_dump(policy_for(url)))
        command = [sys.executable, "-m", "gateway", "serve", "--policy", str(policy), "--port", "0"]
        with running(command, folder / "gateway", r"warmpath ready on (\S+) policy") as gateway_url:
            yield urlsplit(gateway_url).port or 0


def policy_for(engine_url: str) -> dict[str, Any]:
    engine = {"name": "engine", "provider": "warmpath", "base_url": f"{engine_url}/v1", "model": MODEL}
    return {
        "deployments": [{**engine, "max_concurrency": SLOTS, "metrics": True}],
        "models": [{"name": MODEL, "deployments": ["engine"]}],
        "cache": {"scope": "off"},
        "classes": {"realtime": {"max_wait": "60s"}},  # long, so that queueing shows as latency and not as rejections
        "rules": [{"match": {"service_tier": "flex"}, "class": "batch"}],
        "tenants": [{"name": "bench", "keys": [{"id": "bench", "hash": hash_key(KEY, "")}]}],
    }


def stream_request(rng: random.Random, words: int, tokens: int, **more: Any) -> bytes:
    message = {"role": "user", "content": " ".join(rng.choices(WORDS, k=words))}
    body = {"model": MODEL, "messages": [message], "stream": True, "max_tokens": tokens, "ignore_eos": True, **more}
    return payload(KEY, body)


async def measure(options: argparse.Namespace, port: int) -> dict[str, Measured]:
    clients, rng, measured = Clients(port), random.Random(3), {name: Measured() for name in SETTINGS}
    await clients.send("warm", stream_request(rng, REALTIME_WORDS, REALTIME_TOKENS))
    for number in range(options.rounds):
        for name in SETTINGS:
            await measure_one(options, clients, rng, name, measured[name])
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    clients.close()
    return measured


async def measure_one(
    options: argparse.Namespace, clients: Clients, rng: random.Random, name: str, measured: Measured
) -> None:
    tier = {"service_tier": "flex"} if name == "two classes" else {}
    began = time.monotonic()
    end = began + options.seconds

    async def background() -> None:
        while time.monotonic() < end:
            call = await clients.send("background", stream_request(rng, BACKGROUND_WORDS, BACKGROUND_TOKENS, **tier))
            if not call.complete:
                measured.background_refused += 1
            elif call.ended is not None:  # if the stream outlives the round, count only the part within it
                part = min(1.0, (end - call.began) / call.seconds)
                measured.background_tokens += round(part * BACKGROUND_TOKENS)

    num_streams = options.background if name != "alone" else 0
    streams = [asyncio.create_task(background()) for _ in range(num_streams)]
    payloads = [
        stream_request(rng, REALTIME_WORDS, REALTIME_TOKENS) for _ in range(int(options.rate * options.seconds * 3))
    ]
    calls = await asyncio.gather(*await offered(clients, [("realtime", options.rate, payloads)], options.seconds, rng))
    await asyncio.gather(*streams)
    measured.seconds += options.seconds
    measured.first_seconds += [call.first for call in calls if call.complete and call.first is not None]
    measured.refused += sum(not call.complete for call in calls)


def plot(measured: dict[str, Measured], title: str) -> str:
    """An SVG of the share of calls (y axis) by time to first token (x axis, logarithmic)."""
    width, height, left, top = 640, 300, 60, 56
    times = [each for one in measured.values() for each in one.first_seconds]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))

    def x(seconds: float) -> float:
        return left + width * (math.log10(seconds) - low) / (high - low)

    def y(share: float) -> float:
        return top + height * (1 - share)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 40} {top + height + 120}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="12" y="24" font-size="15" font-weight="600">{escape(title)}</text>',
    ]
    for power in range(low, high + 1):
        at = f"{10.0**power:g} s" if power >= 0 else f"{10 ** (power + 3):g} ms"
        parts.append(f'<path d="M{x(10.0**power):.1f} {top}V{top + height}" stroke="#e9ecef"/>')
        parts.append(f'<text x="{x(10.0**power):.1f}" y="{top + height + 18}" text-anchor="middle">{at}</text>')
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        parts.append(f'<path d="M{left} {y(share):.1f}H{left + width}" stroke="#e9ecef"/>')
        if share != 1.0:
            parts.append(f'<text x="{left - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for row, (name, one) in enumerate(measured.items()):
        ordered = sorted(one.first_seconds)
        points = " ".join(f"{x(each):.1f},{y((n + 1) / len(ordered)):.1f}" for n, each in enumerate(ordered))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        figures = one.summary()
        legend = (
            f"{name}: p50 {figures['ttft_ms']['p50']:.0f} ms, p99 {figures['ttft_ms']['p99']:.0f} ms, "
            f"{figures['background_tokens_per_second']:g} background tokens per second"
        )
        at_y = top + height + 46 + 20 * row
        parts.append(f'<rect x="{left}" y="{at_y - 10}" width="12" height="12" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{left + 20}" y="{at_y}">{escape(legend)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def save(options: argparse.Namespace, measured: dict[str, Measured]) -> None:
    now = datetime.datetime.now(datetime.UTC)
    path: Path = options.out or RESULTS / f"mixed-{now:%Y-%m-%d}.json"
    given = {name: value for name, value in vars(options).items() if name != "out"}
    summary = {name: one.summary() for name, one in measured.items()}
    about = {"when": now.isoformat(timespec="seconds"), "machine": machine(), "options": given}
    first_ms: dict[str, Sequence[float]] = {
        name: [round(1000 * each, 1) for each in one.first_seconds] for name, one in measured.items()
    }
    path.write_text(json.dumps({**about, "summary": summary, "first_ms": first_ms}) + "\n")
    path.with_suffix(".svg").write_text(
        plot(measured, "Time to first token of real-time calls beside background streams")
    )


if __name__ == "__main__":
    main()
