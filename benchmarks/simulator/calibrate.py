"""Fits the simulated engine's constants to a bundled engine on this machine, and states the error of its predictions.

    python -m benchmarks.simulator.calibrate [--rounds 3] [--vllm-router PATH] [--sglang-router PATH] [--write]

Bundled engines serve the demo model with a longer context. Scenes of one to eight requests are sent to them: prompts of
several lengths, new and cached, with short and long answers. The constants of `EngineSpeed` are linear in the processor
time of a scene (`processor_time.py`), and are fitted to it by least squares: those of steps to the time of the engine's
thread that computes them, those of calls to the time of all other threads. Three engines get each scene at once for
that, since engines on one machine share its caches, too. Times by the clock only test: with one engine alone, the
simulated engine predicts the times to the first chunk and to the end of the answer, as a client sees them. The mixed
scenes test, too, and are not fitted to. The middle round of each scene counts: live runs have what disturbs one, too.

What a call costs besides the engine's steps depends on the router. So conversations of `benchmarks/warm_paths` are sent
through each router to the same three engines, one at a time and several at once, and the constants of calls are fitted
to all of them: with others at once, a call finds less in the processor's caches. The routers take turns with each
conversation, since the machine is not equally fast at all times. What the clock shows of single calls beyond their
processor time is a router's `wait`: one that writes little at a time to a connection, without `TCP_NODELAY`, waits 40
ms for the other side's acknowledgement if the connection was used a moment ago. Engines that do not report cached
tokens cost the gateway the same, so it has no constants of its own for them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import itertools
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from benchmarks.simulator.processor_time import OWN, Stopwatch, Thread, descendants
from benchmarks.warm_paths import peers
from benchmarks.warm_paths.conversations import BLOCK_TOKENS
from benchmarks.warm_paths.run import machine
from benchmarks.warm_paths.stack import MODEL, engine, key_of, long_demo_model
from benchmarks.warm_paths.traffic import Messages, traffic
from gateway.simulator.engine_cache import EngineCache
from gateway.simulator.engine_steps import EngineEvent, EngineJob, EngineSpeed, Phase
from gateway.simulator.simulated_engine import SimulatedEngine

RESULTS = Path(__file__).parent / "results"
NUM_BLOCKS = 6000
STEP_TOKENS_MAX, RUNNING_MAX = 512, 64  # the bundled engine's defaults
REQUEST_SECONDS_MAX = 120.0
FIRST_GUESS = EngineSpeed(
    0.0002, 4e-5, 1e-4, 3e-8, 2e-7, 0.001, 3e-7, 0.005, 1e-6, step_tokens_max=STEP_TOKENS_MAX, running_max=RUNNING_MAX
)
STEPS = ("step", "prefill_token", "prefill_context", "decode", "decode_context", "start", "start_token")
CALLS = ("request", "request_token", "chunk")
FITS = 2  # the second one with the steps that the first one predicts
ROUTED_KINDS, ROUTED_CONVERSATIONS, ANSWERS = ("agents", "coding"), 6, (2, 16, 48)
AT_ONCE = (1, ROUTED_CONVERSATIONS)  # conversations through a router


@dataclass(frozen=True)
class Asked:
    """One request: its messages, how long its answer is, and when it is sent in its scene."""

    messages: Messages
    output_tokens: int
    at: float = 0.0


@dataclass(frozen=True)
class Scene:
    """Requests that run together on an idle engine."""

    kind: str
    requests: tuple[Asked, ...]
    is_test: bool = False


@dataclass(frozen=True)
class RunningRouter:
    """A router before the engines, with the processes that its calls concern: its own and those of the engines."""

    url: str
    processes: set[int]


@dataclass
class Measured:
    """What the client saw of one request, in seconds from its scene's beginning."""

    sent: float
    first_chunk: float
    finished: float
    prompt_tokens: int
    cached_tokens: int


@dataclass
class Observed:
    """One scene as it was measured, with the processor time of all threads."""

    scene: Scene
    requests: list[Measured]
    threads: Mapping[Thread, float]
    step_seconds: float = 0.0  # of the engine's thread that computes
    other_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """By the clock, of all requests."""
        return sum(one.finished - one.sent for one in self.requests)

    @property
    def processor_seconds(self) -> float:
        return self.step_seconds + self.other_seconds


def scenes(first_text: int) -> list[Scene]:
    """All scenes, with texts of these numbers and the next ones."""
    made: list[Scene] = []
    texts = itertools.count(first_text)
    for words in (60, 150, 300, 700, 1400, 2400):
        asked = _asked(next(texts), words, 1)
        made += [Scene("new prompt", (asked,)), Scene("cached prompt", (asked,))]
    for words in (400, 1500):
        text = next(texts)
        made.append(Scene("new prompt", (_asked(text, words, 1),)))
        made += [Scene("next turn", (_asked(text, words + more, 16),)) for more in (40, 120, 320)]
    for count in (1, 2, 4, 8):
        long = [(next(texts), 1000) for _ in range(count)]
        made.append(Scene("answers", tuple(_asked(next(texts), 60, 48) for _ in range(count))))
        made.append(Scene("answers to long prompts", tuple(_asked(*one, 48) for one in long)))
    rng = random.Random(2)
    for count in (2, 4, 8):
        asked_of = [(next(texts), rng.randrange(300, 1800)) for _ in range(count)]
        for kind, more in (("prompts at once", 0), ("next turns at once", 80), ("next turns at once", 240)):
            made.append(Scene(kind, tuple(_asked(text, words + more, 16) for text, words in asked_of)))
    rng = random.Random(1)
    for count in range(1, 9):
        asked_of = [(next(texts), rng.randrange(100, 1800)) for _ in range(count)]
        at = [rng.uniform(0.0, 0.2 * count) for _ in range(count)]
        for kind, more in (("mixed", 0), ("mixed, next turn", 80)):
            requests = [_asked(text, words + more, 16, when) for (text, words), when in zip(asked_of, at, strict=True)]
            made.append(Scene(kind, tuple(requests), is_test=True))
    return made


def _asked(text: int, words: int, output_tokens: int, at: float = 0.0) -> Asked:
    rng = random.Random(text)
    content = " ".join("".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 7))) for _ in range(words))
    return Asked([{"role": "user", "content": content}], output_tokens, at)


def conversation_scenes(beginning: str) -> list[list[Scene]]:
    """The turns of conversations of the live comparison, of one at a time and of a group at once.

    What they begin with keeps routers and rounds apart. A conversation ends for all of a group with the shortest one.
    """
    lengths, made = itertools.cycle(ANSWERS), list[list[Scene]]()
    for at_once, kind in itertools.product(AT_ONCE, ROUTED_KINDS):
        conversations = [turns.requests for turns in traffic(kind, ROUTED_CONVERSATIONS, 1)]
        for first in range(0, ROUTED_CONVERSATIONS, at_once):
            group, begin = conversations[first : first + at_once], f"{beginning} {at_once}"
            made.append(
                [
                    Scene(kind, tuple(Asked(_beginning_with(begin, one), next(lengths)) for one in turns))
                    for turns in zip(*group, strict=False)
                ]
            )
    return made


def _beginning_with(text: str, messages: Messages) -> Messages:
    first, *others = messages
    return [first | {"content": f"{text}: {first['content']}"}, *others]


WARM_UP = Scene("warm-up", (_asked(10**6, 800, 8),))


async def measure_all(urls: Sequence[str], wanted: Iterable[Scene], engines: int) -> list[Observed]:
    """Run the scenes one after the other, after a first one that warms the engines up. Each URL gets each scene.

    The times are those that a client of the first URL sees, the processor times the mean of the URLs.
    """
    processes = descendants()
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(httpx2.AsyncClient(base_url=url, timeout=REQUEST_SECONDS_MAX))
            for url in urls
        ]
        found = [await _observe(scene, clients, processes) for scene in [WARM_UP, *wanted]]
    _divide_processor_time(found, engines)
    return found[1:]


async def measure_in_turn(routers: Mapping[str, RunningRouter], rounds: int) -> dict[str, list[list[Observed]]]:
    """By router, the rounds of all conversations. Each conversation goes through each router, one after the other."""
    found: dict[str, list[list[Observed]]] = {name: [] for name in routers}
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(httpx2.AsyncClient(base_url=one.url, timeout=REQUEST_SECONDS_MAX))
            for name, one in routers.items()
        }
        for number in range(rounds):
            wanted = {name: [[WARM_UP], *conversation_scenes(f"{name} {number}")] for name in routers}
            for name in routers:
                found[name].append([])
            for same in zip(*wanted.values(), strict=True):
                for name, conversation in zip(wanted, same, strict=True):
                    for scene in conversation:
                        found[name][-1].append(await _observe(scene, [clients[name]], routers[name].processes))
    for runs in found.values():
        for run in runs:
            _divide_processor_time(run, peers.ENGINES)
            del run[0]
    return found


async def _observe(scene: Scene, clients: Sequence[httpx2.AsyncClient], processes: Iterable[int]) -> Observed:
    stopwatch, began = Stopwatch(processes), time.monotonic()
    sent = [_send(client, asked, began) for client in clients for asked in scene.requests]
    requests = (await asyncio.gather(*sent))[: len(scene.requests)]
    threads = {thread: seconds / len(clients) for thread, seconds in stopwatch.seconds().items()}
    return Observed(scene, requests, threads)


def _divide_processor_time(found: Sequence[Observed], engines: int) -> None:
    """The thread that computes most in an engine is the one that computes its steps."""
    total: dict[Thread, float] = {}
    for observed in found:
        for thread, seconds in observed.threads.items():
            total[thread] = total.get(thread, 0.0) + seconds
    processes = {process for process, _ in total if (process, process) != OWN}
    busiest = [max((thread for thread in total if thread[0] == one), key=total.__getitem__) for one in processes]
    stepping = sorted(busiest, key=total.__getitem__)[-engines:]
    for observed in found:
        observed.step_seconds = sum(observed.threads.get(thread, 0.0) for thread in stepping)
        observed.other_seconds = sum(observed.threads.values()) - observed.step_seconds


async def _send(client: httpx2.AsyncClient, asked: Asked, began: float) -> Measured:
    body = {"model": MODEL, "messages": asked.messages, "temperature": 0, "max_tokens": asked.output_tokens,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    headers = {"authorization": f"Bearer {key_of(peers.TENANT)}"}
    await asyncio.sleep(max(0.0, began + asked.at - time.monotonic()))
    sent, first, usage = time.monotonic(), 0.0, dict[str, Any]()
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {") or (first and '"usage":{' not in line):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            if not first and any(choice["delta"].get("content") is not None for choice in chunk["choices"]):
                first = time.monotonic()
    finished = time.monotonic()
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Measured(sent - began, (first or finished) - began, finished - began, usage["prompt_tokens"], cached)


class RecordedEngine(SimulatedEngine):
    """Counts what its steps consist of: what each constant of `STEPS` is multiplied with."""

    def __init__(self, timing: EngineSpeed) -> None:
        super().__init__(EngineCache(NUM_BLOCKS), timing, block_tokens=BLOCK_TOKENS)
        self.counts = dict.fromkeys(STEPS, 0.0)

    def _complete(self, phase: Phase, now: float, events: list[EngineEvent]) -> None:
        steps, counts = phase.steps, self.counts
        counts["step"] += steps
        for job, tokens in phase.parts:
            counts["prefill_token"] += steps * tokens
            counts["prefill_context"] += steps * tokens * (job.computed + steps * tokens / 2)
        counts["decode"] += steps * len(self.decoding)
        counts["decode_context"] += sum(steps * (job.computed + (steps - 1) / 2) for job in self.decoding)
        super()._complete(phase, now, events)


def simulate(observed: Observed, timing: EngineSpeed) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """Predicted seconds to the first chunk and to the end, of each request, and what the steps consisted of.

    The same tokens are cached.
    """
    simulated = RecordedEngine(timing)
    arrivals: list[tuple[float, EngineJob]] = []
    for number, (asked, seen) in enumerate(zip(observed.scene.requests, observed.requests, strict=True)):
        chain = range(number * 10**6, number * 10**6 + seen.prompt_tokens // BLOCK_TOKENS)
        cached = chain[: seen.cached_tokens // BLOCK_TOKENS]
        if cached and (table := simulated.cache.allocate((), len(cached))) is not None:
            simulated.cache.publish(table, cached)
            simulated.cache.free(table)
        job = EngineJob(tuple(chain), seen.prompt_tokens, asked.output_tokens)
        arrivals.append((seen.sent + timing.request + timing.request_token * seen.prompt_tokens, job))
        simulated.counts["start"] += 1
        simulated.counts["start_token"] += seen.prompt_tokens
    waiting, ends = sorted(arrivals, key=lambda arrival: arrival[0]), dict[EngineJob, float]()
    while waiting or simulated.next_event_at < math.inf:
        if waiting and waiting[0][0] <= simulated.next_event_at:
            at, job = waiting.pop(0)
            simulated.submit(job, at)
        else:
            now = simulated.next_event_at
            ends |= {event.job: now for event in simulated.advance(now) if event.is_end}
    times = [
        (job.first_chunk_at - seen.sent, ends[job] - seen.sent)
        for (_, job), seen in zip(arrivals, observed.requests, strict=True)
    ]
    return times, simulated.counts


def fit(observed: Sequence[Observed]) -> EngineSpeed:
    """The constants with the least squares of the relative errors of the scenes' processor times."""
    calls: dict[str, Any] = fit_calls(observed)
    timing = dataclasses.replace(FIRST_GUESS, **calls)
    for _ in range(FITS):
        counts = [simulate(one, timing)[1] for one in observed]
        seconds = np.array([one.step_seconds for one in observed])
        found = _least_squares([[one[name] for name in STEPS] for one in counts], seconds, 1 / seconds)
        constants: dict[str, Any] = dict(zip(STEPS, found, strict=True))
        timing = dataclasses.replace(timing, **constants)
    return timing


def fit_calls(observed: Sequence[Observed]) -> dict[str, float]:
    """The constants of calls, by the processor time besides the engine's steps."""
    counts = [
        [
            len(one.requests),
            sum(seen.prompt_tokens for seen in one.requests),
            sum(asked.output_tokens for asked in one.scene.requests),
        ]
        for one in observed
    ]
    seconds = np.array([one.other_seconds for one in observed])
    found = _least_squares(counts, seconds, seconds**-0.5)  # the variance of a sum grows with its terms
    return dict(zip(CALLS, found, strict=True))


def _least_squares(counts: Sequence[Sequence[float]], seconds: Any, weights: Any) -> list[float]:
    """Constants of at least 0, of which the sums weighted with the counts come closest to these seconds."""
    rows, aim = np.array(counts, dtype=float) * weights[:, None], seconds * weights
    columns = list(range(rows.shape[1]))
    while True:
        found = np.linalg.lstsq(rows[:, columns], aim, rcond=None)[0]
        if found.min() >= 0:
            break
        columns.remove(columns[int(found.argmin())])
    values = dict(zip(columns, found, strict=True))
    return [float(values.get(column, 0.0)) for column in range(rows.shape[1])]


def errors(observed: Sequence[Observed], timing: EngineSpeed) -> dict[str, dict[str, float]]:
    """By kind of scene: the mean relative error of single times, and that of their sums."""
    kinds: dict[str, list[tuple[float, float, float, float]]] = {}
    for one in observed:
        for (first, end), seen in zip(simulate(one, timing)[0], one.requests, strict=True):
            row = (first, seen.first_chunk - seen.sent, end, seen.finished - seen.sent)
            kinds.setdefault(one.scene.kind, []).append(row)
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


def calls_of_routers(folder: Path, model: Path, programs: dict[str, Path], rounds: int) -> dict[str, dict[str, float]]:
    """The constants of calls, for each router before the engines of the live comparison."""
    with contextlib.ExitStack() as stack:
        deployments = [
            stack.enter_context(engine(folder / f"e{number}", model, NUM_BLOCKS)) for number in range(peers.ENGINES)
        ]
        engines, routers = descendants(), dict[str, RunningRouter]()
        for name in [*peers.OURS[:2], *programs]:
            others = descendants()
            place = folder / name.replace("/", "-")
            url = stack.enter_context(peers.router(name, place, deployments, programs))
            routers[name] = RunningRouter(url, descendants() - others | engines)
        found = asyncio.run(measure_in_turn(routers, rounds))
    calls = dict[str, dict[str, float]]()
    for name, runs in found.items():
        calls[name] = fit_calls(list(_middle(runs, attrgetter("processor_seconds")))) | {"wait": wait_seconds(runs)}
        print(f"{name:26}", json.dumps(calls[name]))
    return calls


def wait_seconds(rounds: Iterable[Sequence[Observed]]) -> float:
    """How long a call waits without any processor time: the median of single calls with the shortest answers.

    Their chunks are hardly sent during a later step, so what is computed for them follows one after the other.
    """
    waits = [
        one.seconds - one.processor_seconds
        for run in rounds
        for one in run
        if [asked.output_tokens for asked in one.scene.requests] == [min(ANSWERS)]
    ]
    return max(0.0, statistics.median(waits))


def _middle(rounds: Sequence[Sequence[Observed]], figure: Callable[[Observed], float]) -> Iterator[Observed]:
    """The round of each scene with the median of this figure. With an even number of rounds, the lower one."""
    return (sorted(same, key=figure)[(len(same) - 1) // 2] for same in zip(*rounds, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often all scenes are measured")
    parser.add_argument("--vllm-router", type=Path, help="vllm-router's program, from the PyPI package of that name")
    parser.add_argument("--sglang-router", type=Path, help="sglang-router's program, likewise")
    parser.add_argument("--write", action="store_true", help="write the result into results/")
    args = parser.parse_args()
    given = {peers.VLLM: args.vllm_router, peers.SGLANG: args.sglang_router}
    programs = {name: path.absolute() for name, path in given.items() if path is not None}
    alone: list[list[Observed]] = []
    together: list[list[Observed]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = long_demo_model(folder)
        for number in range(args.rounds):
            with contextlib.ExitStack() as stack:
                urls: list[str] = []
                for engines, runs in ((1, alone), (peers.ENGINES, together)):
                    while len(urls) < engines:
                        place = folder / f"engine-{number}-{len(urls)}"
                        deployment = stack.enter_context(engine(place, model, NUM_BLOCKS))
                        urls.append(deployment["base_url"].removesuffix("/v1"))
                    runs.append(asyncio.run(measure_all(urls, scenes(1000 * engines), engines)))
        middle = _middle(together, attrgetter("processor_seconds"))
        timing = fit([one for one in middle if not one.scene.is_test])
        found = errors(list(_middle(alone, attrgetter("seconds"))), timing)
        print(json.dumps(dataclasses.asdict(timing)))
        for kind, row in found.items():
            print(f"{kind:26}", json.dumps(row))
        routers = calls_of_routers(folder, model, programs, args.rounds)
    if args.write:
        now = datetime.datetime.now(datetime.UTC)
        result = {"at": now.isoformat(timespec="seconds"), "machine": machine(), "timing": dataclasses.asdict(timing)}
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps(result | {"routers": routers, "errors": found}, indent=1) + "\n"
        (RESULTS / f"calibration-{now:%Y-%m-%d}.json").write_text(text)


if __name__ == "__main__":
    main()
