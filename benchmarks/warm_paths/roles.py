"""What roles do for answers in progress beside long prompts: `python -m benchmarks.warm_paths.roles`.

Two bundled engines with one thread each are behind the gateway. Some clients stream answers to short prompts, one after
the other. Beside them, a long prompt arrives at regular intervals. In every other run, one engine has the role prefill
and the other one the role decode; otherwise both do everything, by prefix affinity. Each run starts new processes, and
all runs send the same requests. All processes are real, and share this machine. The figures:

    gap       between two chunks of an answer to a short prompt, at the client
    longest   gap of each such answer
    short     time to the first chunk of an answer to a short prompt
    long      the same for a long prompt
    answers   to short prompts that were complete in time
    CPU       seconds of both engines and the gateway, their start included
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
from tokenizers import Tokenizer, pre_tokenizers

from benchmarks.engine.peers import servable
from benchmarks.engine.shapes import VOCAB_SIZE
from benchmarks.warm_paths.run import RESULTS, machine
from benchmarks.warm_paths.stack import MODEL, engine, gateway, key_of

BLOCKS = 1500  # of each engine: more than all calls in flight need
TRANSFERS = ("--dtype", "bfloat16", "--kv-transfer", "--kv-transfer-peers", "127.0.0.1")
TENANT = "bench"
SHORT_TOKENS, LONG_ANSWER_TOKENS = 32, 4
WARM_UP_SECONDS = 5.0  # in which nothing is measured
REQUEST_SECONDS_MAX = 300.0


@dataclass
class Measured:
    """Seconds, of the requests of one run."""

    gaps: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)
    short: list[float] = field(default_factory=list)
    long: list[float] = field(default_factory=list)


class Clients:
    """The clients of one run."""

    def __init__(self, url: str, args: argparse.Namespace) -> None:
        self._args = args
        self._url = url
        self._rng = random.Random(args.seed)
        self.measured = Measured()

    async def run(self) -> None:
        began, args = time.monotonic(), self._args
        limits = httpx2.Limits(max_connections=None)
        headers = {"authorization": f"Bearer {key_of(TENANT)}"}
        async with httpx2.AsyncClient(
            base_url=self._url, timeout=REQUEST_SECONDS_MAX, limits=limits, headers=headers
        ) as self._http:
            self._from, self._until = began + WARM_UP_SECONDS, began + WARM_UP_SECONDS + args.seconds
            async with asyncio.TaskGroup() as tasks:
                for _ in range(args.streams):
                    tasks.create_task(self._short_ones())
                tasks.create_task(self._long_ones(tasks))

    async def _short_ones(self) -> None:
        while time.monotonic() < self._until:
            sent = time.monotonic()
            chunks = await self._stream(SHORT_TOKENS, self._args.answer)
            if sent >= self._from and chunks[-1] <= self._until:
                self.measured.short.append(chunks[0] - sent)
                gaps = [later - earlier for earlier, later in pairwise(chunks)]
                self.measured.gaps += gaps
                self.measured.longest.append(max(gaps))

    async def _long_ones(self, tasks: asyncio.TaskGroup) -> None:
        while time.monotonic() < self._until:
            tasks.create_task(self._long_one())
            await asyncio.sleep(self._args.every)

    async def _long_one(self) -> None:
        sent = time.monotonic()
        chunks = await self._stream(self._args.long, LONG_ANSWER_TOKENS)
        if self._from <= sent <= self._until:
            self.measured.long.append(chunks[0] - sent)

    async def _stream(self, prompt_tokens: int, answer_tokens: int) -> list[float]:
        """When each chunk of an answer arrived."""
        words = [f"w{self._rng.randrange(2, VOCAB_SIZE)}" for _ in range(prompt_tokens)]
        body = {
            "model": MODEL, "prompt": " ".join(words), "max_tokens": answer_tokens, "ignore_eos": True,
            "temperature": 0, "stream": True,
        }  # fmt: skip
        chunks = []
        async with self._http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                raise SystemExit(f"{reply.status_code}: {(await reply.aread()).decode()}")
            async for line in reply.aiter_lines():
                if line.startswith("data: {") and '"error"' in line:
                    raise SystemExit(line)
                if line.startswith("data: {"):
                    chunks.append(time.monotonic())
        return chunks


def measure(args: argparse.Namespace, model: Path, *, roles: bool) -> dict[str, Any]:
    before = _children_cpu_seconds()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        deployments = [stack.enter_context(engine(folder / name, model, BLOCKS, *TRANSFERS)) for name in ("a", "b")]
        if roles:
            named = zip(deployments, ("prefill", "decode"), strict=True)
            deployments = [deployment | {"role": role} for deployment, role in named]
        url = stack.enter_context(gateway(folder / "gw", deployments, [TENANT]))
        clients = Clients(url, args)
        asyncio.run(clients.run())
        prefills = _metric(url, 'warmpath_upstream_attempts_total{deployment="a",outcome="prefilled"}')
    found = clients.measured
    return {
        "roles": roles,
        "prefills": int(prefills),
        "answers": len(found.short),
        **_percentiles("gap", found.gaps, 50, 99, 99.9),
        **_percentiles("longest", found.longest, 50, 90),
        **_percentiles("short", found.short, 50, 90),
        **_percentiles("long", found.long, 50, 90),
        "cpu_seconds": round(_children_cpu_seconds() - before, 1),
    }


def _model(directory: Path) -> Path:
    """A checkpoint of random weights (100 M parameters), one token for each word."""
    servable("tiny", directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def _percentiles(name: str, seconds: Sequence[float], *percents: float) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {percent: ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))] for percent in percents}
    return {f"{name}_p{percent:g}_ms": round(1000 * value, 1) for percent, value in at.items()}


def _children_cpu_seconds() -> float:
    """The CPU time of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _metric(url: str, series: str) -> float:
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(series))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=3, help="clients that stream answers to short prompts")
    parser.add_argument("--answer", type=int, default=64, help="tokens of such an answer")
    parser.add_argument("--long", type=int, default=1200, help="tokens of a long prompt")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two long prompts")
    parser.add_argument("--seconds", type=float, default=24.0, help="of each run, after its warm-up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/warm_paths/results)")
    args = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as directory:
        model = _model(Path(directory) / "model")
        for _ in range(args.rounds):
            for roles in (False, True):
                runs.append(measure(args, model, roles=roles))
                print(json.dumps(runs[-1]), flush=True)
    now = datetime.datetime.now(datetime.UTC)
    setup = {name: getattr(args, name) for name in ("streams", "answer", "long", "every", "seconds")}
    medians = {
        "roles" if roles else "no roles": {
            name: statistics.median(run[name] for run in runs if run["roles"] is roles)
            for name in runs[0]
            if name != "roles"
        }
        for roles in (False, True)
    }
    result = {"at": now.isoformat(timespec="seconds"), "machine": machine(), **setup, "medians": medians, "runs": runs}
    out = args.out or RESULTS
    out.mkdir(parents=True, exist_ok=True)
    (out / f"roles-{now:%Y%m%d-%H%M%S}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
