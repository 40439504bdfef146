"""Fits the simulated engine's constants to a bundled engine on this machine, and states the error of its predictions.

    python -m benchmarks.simulator.calibrate [--write]

One bundled engine serves the demo model with a longer context. Scenes of one to eight requests are sent to it: prompts
of several lengths, new and cached, with short and long answers. The mixed scenes only test: the constants of
`EngineSpeed` are fitted to the others, so that the simulated engine's times to the first chunk and to the end of the
answer come as close as possible, as relative errors. The client runs on the same machine, so its time counts as the
engine's. Run it on an idle machine; it takes about a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from benchmarks.warm_paths.conversations import BLOCK_TOKENS
from benchmarks.warm_paths.run import machine
from benchmarks.warm_paths.stack import MODEL, engine, long_demo_model
from gateway.simulator.engine_cache import EngineCache
from gateway.simulator.engine_steps import EngineJob, EngineSpeed
from gateway.simulator.simulated_engine import SimulatedEngine

RESULTS = Path(__file__).parent / "results"
NUM_BLOCKS = 6000
STEP_TOKENS_MAX, RUNNING_MAX = 512, 64  # the bundled engine's defaults
REQUEST_SECONDS_MAX = 120.0
FIRST_GUESS = EngineSpeed(0.002, 5e-5, 0.001, 1e-8, 1e-7, 0.005, 1e-6)
FITTED = ("step", "prefill_token", "decode", "prefill_context", "decode_context", "request", "request_token")
ROUNDS, DAMPING = 40, 0.1


@dataclass(frozen=True)
class Asked:
    """One request: which text it has, up to which word, how long its answer is, and when it is sent in its scene."""

    text: int
    words: int
    output_tokens: int
    at: float = 0.0


@dataclass(frozen=True)
class Scene:
    """Requests that run together on an idle engine."""

    kind: str
    requests: tuple[Asked, ...]
    is_test: bool = False


@dataclass
class Measured:
    """What the client saw of one request, in seconds from its scene's beginning."""

    sent: float
    first_chunk: float
    finished: float
    prompt_tokens: int
    cached_tokens: int


def scenes() -> list[Scene]:
    made: list[Scene] = []
    texts = iter(range(10**6))
    for words in (60, 150, 300, 700, 1400, 2400):
        text = next(texts)
        made += [Scene("new prompt", (Asked(text, words, 1),)), Scene("cached prompt", (Asked(text, words, 1),))]
    for words in (400, 1500):
        text = next(texts)
        made.append(Scene("new prompt", (Asked(text, words, 1),)))
        made += [Scene("next turn", (Asked(text, words + more, 16),)) for more in (40, 120, 320)]
    for count in (1, 2, 4, 8):
        long = [(next(texts), 1000) for _ in range(count)]
        made.append(Scene("answers", tuple(Asked(next(texts), 60, 48) for _ in range(count))))
        made.append(Scene("answers to long prompts", tuple(Asked(*one, 48) for one in long)))
    rng = random.Random(1)
    for count in range(1, 9):
        asked = [(next(texts), rng.randrange(100, 1800)) for _ in range(count)]
        at = [rng.uniform(0.0, 0.2 * count) for _ in range(count)]
        first = tuple(Asked(*one, 16, at) for one, at in zip(asked, at, strict=True))
        turns = tuple(dataclasses.replace(one, words=one.words + 80) for one in first)
        made.append(Scene("mixed", first, is_test=True))
        made.append(Scene("mixed, next turn", turns, is_test=True))
    return made


def text_of(asked: Asked) -> str:
    rng = random.Random(asked.text)
    return " ".join("".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 7))) for _ in range(asked.words))


async def measure(url: str, scene: Scene) -> list[Measured]:
    async with httpx2.AsyncClient(base_url=url, timeout=REQUEST_SECONDS_MAX) as client:
        began = time.monotonic()
        return await asyncio.gather(*(_send(client, asked, began) for asked in scene.requests))


async def _send(client: httpx2.AsyncClient, asked: Asked, began: float) -> Measured:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text_of(asked)}], "temperature": 0,
            "max_tokens": asked.output_tokens, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    await asyncio.sleep(max(0.0, began + asked.at - time.monotonic()))
    sent, first, usage = time.monotonic(), 0.0, dict[str, Any]()
    async with client.stream("POST", "chat/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            if not first and any(choice["delta"].get("content") is not None for choice in chunk["choices"]):
                first = time.monotonic()
    finished = time.monotonic()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Measured(sent - began, (first or finished) - began, finished - began, usage["prompt_tokens"], cached)


def simulate(scene: Scene, measured: Sequence[Measured], timing: EngineSpeed) -> list[tuple[float, float]]:
    """Predicted seconds to the first chunk and to the end, of each request. Finds the same tokens cached."""
    simulated = SimulatedEngine(EngineCache(NUM_BLOCKS), timing, block_tokens=BLOCK_TOKENS)
    arrivals: list[tuple[float, EngineJob]] = []
    for number, (asked, seen) in enumerate(zip(scene.requests, measured, strict=True)):
        chain = range(number * 10**6, number * 10**6 + seen.prompt_tokens // BLOCK_TOKENS)
        cached = chain[: seen.cached_tokens // BLOCK_TOKENS]
        if cached and (table := simulated.cache.allocate((), len(cached))) is not None:
            simulated.cache.publish(table, cached)
            simulated.cache.free(table)
        job = EngineJob(tuple(chain), seen.prompt_tokens, asked.output_tokens)
        arrivals.append((seen.sent + timing.request + timing.request_token * seen.prompt_tokens, job))
    waiting, ends = sorted(arrivals, key=lambda arrival: arrival[0]), dict[EngineJob, float]()
    while waiting or simulated.next_event_at < math.inf:
        if waiting and waiting[0][0] <= simulated.next_event_at:
            at, job = waiting.pop(0)
            simulated.submit(job, at)
        else:
            now = simulated.next_event_at
            ends |= {event.job: now for event in simulated.advance(now) if event.is_end}
    return [
        (job.first_chunk_at - seen.sent, ends[job] - seen.sent)
        for (_, job), seen in zip(arrivals, measured, strict=True)
    ]


Observed = Sequence[tuple[Scene, list[Measured]]]


def residuals(observed: Observed, timing: EngineSpeed) -> list[float]:
    """Logarithms of predicted over measured times."""
    found = []
    for scene, measured in observed:
        for (first, end), seen in zip(simulate(scene, measured, timing), measured, strict=True):
            found += [math.log(first / (seen.first_chunk - seen.sent)), math.log(end / (seen.finished - seen.sent))]
    return found


def fit(observed: Observed) -> EngineSpeed:
    """The constants with the least squares of `residuals`, by damped Gauss-Newton steps on their logarithms."""
    base = dataclasses.replace(FIRST_GUESS, step_tokens_max=STEP_TOKENS_MAX, running_max=RUNNING_MAX)
    logs = np.log([getattr(base, name) for name in FITTED])
    damping, best = DAMPING, np.array(residuals(observed, _with(base, logs)))
    for _ in range(ROUNDS):
        slopes = np.array([
            (np.array(residuals(observed, _with(base, logs + 0.01 * unit))) - best) / 0.01 for unit in np.eye(len(logs))
        ]).T  # fmt: skip
        change = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(logs)), -slopes.T @ best)
        tried = logs + np.clip(change, -1.0, 1.0)
        found = np.array(residuals(observed, _with(base, tried)))
        if found @ found < best @ best:
            logs, best, damping = tried, found, damping / 3
        else:
            damping *= 4
    return _with(base, logs)


def _with(base: EngineSpeed, logs: Any) -> EngineSpeed:
    values: dict[str, Any] = {name: float(math.exp(value)) for name, value in zip(FITTED, logs, strict=True)}
    return dataclasses.replace(base, **values)


def errors(observed: Observed, timing: EngineSpeed) -> dict[str, dict[str, float]]:
    """By kind of scene: the mean relative error of single times, and that of their sums."""
    kinds: dict[str, list[tuple[float, float, float, float]]] = {}
    for scene, measured in observed:
        for (first, end), seen in zip(simulate(scene, measured, timing), measured, strict=True):
            row = (first, seen.first_chunk - seen.sent, end, seen.finished - seen.sent)
            kinds.setdefault(scene.kind, []).append(row)
    return {
        kind: {
            "requests": len(rows),
            "ttft_error": round(statistics.fmean(abs(a / b - 1) for a, b, _, _ in rows), 3),
            "ttft_sum_error": round(sum(row[0] for row in rows) / sum(row[1] for row in rows) - 1, 3),
            "total_error": round(statistics.fmean(abs(a / b - 1) for _, _, a, b in rows), 3),
            "total_sum_error": round(sum(row[2] for row in rows) / sum(row[3] for row in rows) - 1, 3),
        }
        for kind, rows in kinds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="how often all scenes are measured")
    parser.add_argument("--write", action="store_true", help="write the result into results/")
    args = parser.parse_args()
    observed: list[tuple[Scene, list[Measured]]] = []
    with tempfile.TemporaryDirectory() as temporary:
        model = long_demo_model(Path(temporary))
        for number in range(args.rounds):
            with engine(Path(temporary) / f"engine-{number}", model, NUM_BLOCKS) as deployment:
                asyncio.run(measure(deployment["base_url"], Scene("warm-up", (Asked(10**6, 800, 8),))))
                for scene in scenes():
                    observed.append((scene, asyncio.run(measure(deployment["base_url"], scene))))
    timing = fit([(scene, measured) for scene, measured in observed if not scene.is_test])
    found = errors(observed, timing)
    print(json.dumps(dataclasses.asdict(timing)))
    for kind, row in found.items():
        print(f"{kind:26}", json.dumps(row))
    if args.write:
        now = datetime.datetime.now(datetime.UTC)
        result = {"at": now.isoformat(timespec="seconds"), "machine": machine(), "timing": dataclasses.asdict(timing)}
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps(result | {"errors": found}, indent=1) + "\n"
        (RESULTS / f"calibration-{now:%Y-%m-%d}.json").write_text(text)


if __name__ == "__main__":
    main()
