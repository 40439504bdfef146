"""Real-time calls beside background work, with and without latency classes: `python -m benchmarks.mixed`.

One bundled engine with the demo model, and the gateway in front of it. Three settings take turns, round after round,
so that other work on the machine disturbs them equally:

    alone         real-time calls only
    one class     beside as many background streams as `--background` says, of the real-time class, too
    two classes   the same, but they have `service_tier: flex`, which the policy assigns to `batch`

Real-time calls arrive at random and do not wait for each other. Each has a prompt of its own, and the benchmark
measures its time to first token. Whenever a background stream ends, another one starts; the benchmark measures the
tokens of all of them. The plot shows, for each setting, the share of calls that had their first token within a time.
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
PLACES = 8  # of the engine
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
class Seen:
    """Measurements of one setting, from all rounds."""

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
    parser.add_argument("--seconds", type=float, default=15.0, help="of each setting in a round")
    parser.add_argument("--rate", type=float, default=3.0, help="real-time calls a second")
    parser.add_argument("--background", type=int, default=16, help="streams at once")
    parser.add_argument("--out", type=Path, help="the file for the result; the plot lies beside it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, components(Path(folder)) as port:
        seen = uvloop.run(measure(options, port))
    save(options, seen)
    for name in SETTINGS:
        print(f"{name:12} {json.dumps(seen[name].summary())}")


@contextlib.contextmanager
def components(folder: Path) -> Iterator[int]:
    engine = [sys.executable, "-m", "backend", "--model", "demo", "--port", "0", "--num-threads", "1"]
    with running(engine, folder / "engine", r"engine ready on (\S+) model") as url:
        policy = folder / "policy.yaml"
        policy.write_text(yaml.safe_dump(policy_for(url)))
        command = [sys.executable, "-m", "gateway", "serve", "--policy", str(policy), "--port", "0"]
        with running(command, folder / "gateway", r"warmpath ready on (\S+) policy") as gateway_url:
            yield urlsplit(gateway_url).port or 0


def policy_for(engine_url: str) -> dict[str, Any]:
    engine = {"name": "engine", "provider": "warmpath", "base_url": f"{engine_url}/v1", "model": MODEL}
    return {
        "deployments": [{**engine, "max_concurrency": PLACES, "metrics": True}],
        "models": [{"name": MODEL, "deployments": ["engine"]}],
        "cache": {"scope": "off"},
        "classes": {"realtime": {"max_wait": "60s"}},  # so that waiting shows, and no refusal hides it
        "rules": [{"match": {"service_tier": "flex"}, "class": "batch"}],
        "tenants": [{"name": "bench", "keys": [{"id": "bench", "hash": hash_key(KEY, "")}]}],
    }


def a_stream(chance: random.Random, words: int, tokens: int, **more: Any) -> bytes:
    message = {"role": "user", "content": " ".join(chance.choices(WORDS, k=words))}
    body = {"model": MODEL, "messages": [message], "stream": True, "max_tokens": tokens, "ignore_eos": True, **more}
    return payload(KEY, body)


async def measure(options: argparse.Namespace, port: int) -> dict[str, Seen]:
    clients, chance, seen = Clients(port), random.Random(3), {name: Seen() for name in SETTINGS}
    await clients.ask("warm", a_stream(chance, REALTIME_WORDS, REALTIME_TOKENS))
    for number in range(options.rounds):
        for name in SETTINGS:
            await measure_one(options, clients, chance, name, seen[name])
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    clients.close()
    return seen


async def measure_one(
    options: argparse.Namespace, clients: Clients, chance: random.Random, name: str, seen: Seen
) -> None:
    tier = {"service_tier": "flex"} if name == "two classes" else {}
    began = time.monotonic()
    end = began + options.seconds

    async def background() -> None:
        while time.monotonic() < end:
            call = await clients.ask("background", a_stream(chance, BACKGROUND_WORDS, BACKGROUND_TOKENS, **tier))
            if not call.complete:
                seen.background_refused += 1
            elif call.ended is not None:  # a stream that runs past the end counts in part
                part = min(1.0, (end - call.began) / call.seconds)
                seen.background_tokens += round(part * BACKGROUND_TOKENS)

    many = options.background if name != "alone" else 0
    streams = [asyncio.create_task(background()) for _ in range(many)]
    payloads = [
        a_stream(chance, REALTIME_WORDS, REALTIME_TOKENS) for _ in range(int(options.rate * options.seconds * 3))
    ]
    calls = await asyncio.gather(
        *await offered(clients, [("realtime", options.rate, payloads)], options.seconds, chance)
    )
    await asyncio.gather(*streams)
    seen.seconds += options.seconds
    seen.first_seconds += [call.first for call in calls if call.complete and call.first is not None]
    seen.refused += sum(not call.complete for call in calls)


def plot(seen: dict[str, Seen], title: str) -> str:
    """The share of calls, upwards, over the time to the first token, in powers of ten."""
    width, height, left, top = 640, 300, 60, 56
    times = [each for one in seen.values() for each in one.first_seconds]
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
    for row, (name, one) in enumerate(seen.items()):
        ordered = sorted(one.first_seconds)
        points = " ".join(f"{x(each):.1f},{y((n + 1) / len(ordered)):.1f}" for n, each in enumerate(ordered))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        figures = one.summary()
        legend = (
            f"{name}: p50 {figures['ttft_ms']['p50']:.0f} ms, p99 {figures['ttft_ms']['p99']:.0f} ms, "
            f"{figures['background_tokens_per_second']:g} background tokens a second"
        )
        at_y = top + height + 46 + 20 * row
        parts.append(f'<rect x="{left}" y="{at_y - 10}" width="12" height="12" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{left + 20}" y="{at_y}">{escape(legend)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def save(options: argparse.Namespace, seen: dict[str, Seen]) -> None:
    now = datetime.datetime.now(datetime.UTC)
    path: Path = options.out or RESULTS / f"mixed-{now:%Y-%m-%d}.json"
    given = {name: value for name, value in vars(options).items() if name != "out"}
    summary = {name: one.summary() for name, one in seen.items()}
    about = {"when": now.isoformat(timespec="seconds"), "machine": machine(), "options": given}
    first_ms: dict[str, Sequence[float]] = {
        name: [round(1000 * each, 1) for each in one.first_seconds] for name, one in seen.items()
    }
    path.write_text(json.dumps({**about, "summary": summary, "first_ms": first_ms}) + "\n")
    path.with_suffix(".svg").write_text(plot(seen, "Time to the first token of real-time calls beside background work"))


if __name__ == "__main__":
    main()
