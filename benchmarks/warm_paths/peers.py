"""Prefix routing beside the published routers: the same conversations, the same three bundled engines, in turns.

    python -m benchmarks.warm_paths.peers --vllm-router PATH --sglang-router PATH [--kinds agents] [--concurrency 1 5]
    python -m benchmarks.warm_paths.peers --summary RESULTS.json

All processes are real. Every run starts three engines with empty caches, and one router before them: Warmpath, with
what the engines report to it (`events`: KV events and metrics; `cached`: only `cached_tokens` in replies; `nothing`:
not even that), vllm-router and sglang-router with their cache-aware policies (both from PyPI), and Warmpath's round
robin. The runs of one cell follow each other directly, so that they meet the same machine. The figures of a run:

    cached      share of the prompt tokens that the engines took from their caches, by the engines' own counters
    TTFT        from the request to the first chunk with content, at the client, in milliseconds: mean and p95
    seconds     for all conversations
    busiest     computed prompt tokens of the busiest engine, divided by the mean of the three

The engines can load blocks from each other, which the peers do not use. With `--transfers`, Warmpath does.

Cells are combinations of a kind of traffic, a size of the caches, and how many conversations run at a time. Without
options, all cells run, one round after the other. `--cells agents:1024:5 chats:3072:2` runs only these, in this order,
and all rounds of a cell before the next one. With `--minutes`, no round begins that would not end in this time, judged
by the longest one so far.

The speed of a shared machine changes from minute to minute. So the runs of a cell are short and come in rounds: in each
round every router replays the same conversations, in another order. A figure is divided by a peer's
in the same round, and the summary has the geometric mean of these quotients over the rounds (of cached shares, the mean
difference), for the peer that is better in the cell. One round says little: a rule that keeps conversations where they
began is lucky with some and not with others. The file of results is written after each run, and a later call with the
same file continues where it ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.warm_paths.conversations import BLOCK_TOKENS
from benchmarks.warm_paths.run import RESULTS, machine
from benchmarks.warm_paths.stack import (
    LOADED_TOKENS_PER_SECOND,
    MODEL,
    TRANSFERS,
    engine,
    gateway,
    key_of,
    long_demo_model,
    running,
)
from benchmarks.warm_paths.traffic import KINDS, Messages, Turns, traffic

ENGINES = 3
ANSWER_TOKENS = 16
REQUEST_SECONDS_MAX = 300.0
TENANT = "t0"
OURS = ("warmpath/events", "warmpath/cached", "warmpath/nothing")
ROUND_ROBIN = "warmpath/round robin"
VLLM, SGLANG = "vllm-router", "sglang-router"
BLOCKS, CONCURRENCY = (1024, 3072), (1, 2, 5, 8, 12)  # of the cells


WARM_UP_WORDS = 600
QUOTIENTS = ("ttft_mean_ms", "ttft_p95_ms", "seconds")  # figures that the summary divides by the better peer's


@dataclass(frozen=True)
class Cell:
    """What the runs of one comparison have in common."""

    kind: str
    blocks: int  # of each engine's cache
    concurrency: int


class Client:
    """Replays conversations, several at a time, and measures each request's time to the first content."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.ttfts: list[float] = []

    async def replay(self, work: Sequence[Turns], concurrency: int) -> None:
        """Each turn is sent when the one before is answered."""
        waiting = iter(work)
        limits = httpx2.Limits(max_connections=concurrency)
        async with httpx2.AsyncClient(base_url=self._url, timeout=REQUEST_SECONDS_MAX, limits=limits) as client:

            async def worker() -> None:
                for conversation in waiting:
                    for messages in conversation.requests:
                        self.ttfts.append(await _send(client, messages))

            await asyncio.gather(*(worker() for _ in range(concurrency)))


async def _send(client: httpx2.AsyncClient, messages: Messages) -> float:
    body = {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True}}  # fmt: skip
    sent_at, ttft = time.monotonic(), 0.0
    headers = {"authorization": f"Bearer {key_of(TENANT)}"}
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"{reply.status_code}: {(await reply.aread()).decode()}")
        async for line in reply.aiter_lines():
            if not ttft and line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if any(choice["delta"].get("content") for choice in chunk["choices"]):
                    ttft = time.monotonic() - sent_at
    return ttft or time.monotonic() - sent_at


@contextlib.contextmanager
def router(
    name: str,
    folder: Path,
    deployments: Sequence[dict[str, Any]],
    programs: dict[str, Path],
    *,
    transfers: bool = False,
) -> Iterator[str]:
    """Run one router before these deployments. Yields its URL. `transfers`: ours lets engines load blocks."""
    if name in programs:
        with _peer(programs[name], folder, [one["base_url"].removesuffix("/v1") for one in deployments]) as url:
            yield url
        return
    signals = ("kv_events", "kv_events_replay", "metrics")
    chosen = [
        one if name == OURS[0] else {field: value for field, value in one.items() if field not in signals}
        for one in deployments
    ]
    if transfers:
        chosen = [one | {"kv_transfer_tokens_per_second": LOADED_TOKENS_PER_SECOND} for one in chosen]
    strategy = "round_robin" if name == ROUND_ROBIN else "prefix_affinity"
    with gateway(folder, chosen, [TENANT], routing={"strategy": strategy}) as url:
        yield url


@contextlib.contextmanager
def _peer(program: Path, folder: Path, urls: Sequence[str]) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(program), *(("launch",) if program.name == SGLANG else ()), "--worker-urls", *urls]
    command += ["--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        command += ["--prometheus-port", str(probe.getsockname()[1])]
    with running(command, folder, r"(?i)(starting server|listening|server started|started)") as _:
        url = f"http://127.0.0.1:{port}"
        _wait_for_models(url)
        yield url


def _wait_for_models(url: str) -> None:
    """Routers accept connections before their workers are known to be healthy."""
    for _ in range(300):
        with contextlib.suppress(httpx2.TransportError):
            body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}
            if httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=10).status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"{url} does not answer")


def _warm_up(url: str) -> None:
    """The first long prompt can take 0.3 s longer, a twentieth of a short run: on a machine that has just started."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Warm. " * WARM_UP_WORDS}], "max_tokens": 16}
    httpx2.post(f"{url}/chat/completions", json=body, timeout=REQUEST_SECONDS_MAX).raise_for_status()


def _counters(url: str) -> tuple[float, float]:
    """An engine's prompt tokens so far: all, and those found in its cache."""
    text = httpx2.get(url.removesuffix("/v1") + "/metrics", timeout=30).text
    found = {
        name: sum(float(value) for value in re.findall(rf"^vllm:{name}(?:_total)?(?:{{.*}})? (\S+)$", text, re.M))
        for name in ("prefix_cache_queries", "prefix_cache_hits")
    }
    return found["prefix_cache_queries"], found["prefix_cache_hits"]


def measure(
    name: str, cell: Cell, work: Sequence[Turns], programs: dict[str, Path], *, transfers: bool
) -> dict[str, Any]:
    """One run of one router in one cell."""
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        model = long_demo_model(folder)
        started = [
            engine(
                folder / f"e{number}", model, cell.blocks, *TRANSFERS, prompt_tokens_details=name != "warmpath/nothing"
            )
            for number in range(ENGINES)
        ]
        with ThreadPoolExecutor(ENGINES) as threads:
            engines = list(threads.map(stack.enter_context, started))
        url = stack.enter_context(router(name, folder / "router", engines, programs, transfers=transfers))
        for one in engines:
            _warm_up(one["base_url"])
        before = [_counters(one["base_url"]) for one in engines]
        client = Client(url)
        began = time.monotonic()
        asyncio.run(client.replay(work, cell.concurrency))
        seconds = time.monotonic() - began
        after = [_counters(one["base_url"]) for one in engines]
    prompt = [late[0] - early[0] for early, late in zip(before, after, strict=True)]
    cached = [late[1] - early[1] for early, late in zip(before, after, strict=True)]
    computed = [all_tokens - hit for all_tokens, hit in zip(prompt, cached, strict=True)]
    ttfts = sorted(client.ttfts)
    return {
        "router": name,
        "transfers": transfers and name in OURS,
        "requests": len(ttfts),
        "cached": round(sum(cached) / sum(prompt), 4),
        "ttft_mean_ms": round(statistics.fmean(ttfts) * 1000),
        "ttft_p95_ms": round(ttfts[int(0.95 * len(ttfts))] * 1000),
        "seconds": round(seconds, 1),
        "busiest": round(max(computed) / statistics.fmean(computed), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-router", type=Path, help="vllm-router's program, from the PyPI package of that name")
    parser.add_argument(
        "--sglang-router", type=Path, help="sglang-router's program, from the PyPI package of that name"
    )
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--blocks", type=int, nargs="*", default=list(BLOCKS), help=f"of {BLOCK_TOKENS} tokens")
    parser.add_argument("--concurrency", type=int, nargs="*", default=list(CONCURRENCY))
    parser.add_argument(
        "--cells", type=read_cell, nargs="*", metavar="KIND:BLOCKS:CONCURRENCY", help="instead of all combinations"
    )
    parser.add_argument("--conversations", type=int, default=12, help="of a run")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no round begins")
    parser.add_argument(
        "--routers", nargs="*", default=[*OURS, VLLM, SGLANG], choices=[*OURS, ROUND_ROBIN, VLLM, SGLANG]
    )
    parser.add_argument("--transfers", action="store_true", help="ours lets engines load blocks from each other")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file for the results; runs that it has are not repeated")
    parser.add_argument("--summary", type=Path, metavar="RESULTS", help="only summarise such a file")
    args = parser.parse_args()
    if args.summary is not None:
        print("\n".join(summary(json.loads(args.summary.read_text())["runs"])))
        return
    programs = {VLLM: args.vllm_router, SGLANG: args.sglang_router}
    programs = {name: path.absolute() for name, path in programs.items() if path is not None and name in args.routers}
    routers = [name for name in args.routers if name in programs or name not in (VLLM, SGLANG)]
    now = datetime.datetime.now(datetime.UTC)
    out: Path = args.out or RESULTS / f"peers-{now:%Y-%m-%d}.json"
    rows: list[dict[str, Any]] = json.loads(out.read_text())["runs"] if out.exists() else []
    done = {run_of(row) for row in rows}
    began, longest = time.monotonic(), 0.0
    for cell, number in _rounds(args):
        run = {"kind": cell.kind, "cache_tokens": cell.blocks * BLOCK_TOKENS, "concurrency": cell.concurrency}
        run["round"] = number
        missing = [name for name in _in_turn(routers, number) if run_of(run | {"router": name}) not in done]
        round_began = time.monotonic()
        if not missing or round_began - began + longest > 60 * args.minutes:
            continue
        work = traffic(cell.kind, args.conversations, args.seed + number)
        for name in missing:
            rows.append(run | measure(name, cell, work, programs, transfers=args.transfers))
            print(json.dumps(rows[-1]), flush=True)
            result = {"at": now.isoformat(timespec="seconds"), "machine": machine(), "engines": ENGINES, "runs": rows}
            out.write_text(json.dumps(result, indent=1) + "\n")
        longest = max(longest, time.monotonic() - round_began)
    print("\n".join(summary(rows)))


def read_cell(text: str) -> Cell:
    """A cell as the command line names it. Raises `ValueError` if there is no such kind."""
    kind, blocks, concurrency = text.split(":")
    if kind not in KINDS:
        raise ValueError(kind)
    return Cell(kind, int(blocks), int(concurrency))


def _rounds(args: argparse.Namespace) -> Iterator[tuple[Cell, int]]:
    """All cells and rounds, in the order in which they run."""
    if args.cells:
        yield from itertools.product(args.cells, range(args.rounds))
        return
    for number, *cell in itertools.product(range(args.rounds), args.kinds, args.blocks, args.concurrency):
        yield Cell(*cell), number


def _in_turn(routers: Sequence[str], number: int) -> list[str]:
    """In each round another router is the first."""
    first = number % len(routers)
    return [*routers[first:], *routers[:first]]


def _cell_of(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["kind"], row["cache_tokens"], row["concurrency"]


def run_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What distinguishes a run from others."""
    return *_cell_of(row), row["round"], row["router"]


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each cell and router of ours, beside the better of the two peers over all rounds of the cell.

    A cell in which a figure is worse than the better peer's is marked with `<`.
    """
    lines = [
        f"{'kind':8} {'cache':>7} {'at once':>7} {'router':24} {'rounds':>6}  cached, points  " + "  ".join(QUOTIENTS)
    ]
    for cell, router in itertools.product(dict.fromkeys(map(_cell_of, rows)), OURS):
        by_round = {(row["router"], row["round"]): row for row in rows if _cell_of(row) == cell}
        pairs = {
            peer: [
                (ours, by_round[peer, number])
                for (name, number), ours in by_round.items()
                if name == router and (peer, number) in by_round
            ]
            for peer in (VLLM, SGLANG)
        }
        compared = [pairs_of for pairs_of in pairs.values() if pairs_of]
        if not compared:
            continue
        cached = min(
            statistics.fmean(100 * (ours["cached"] - peer["cached"]) for ours, peer in one) for one in compared
        )
        quotients = [max(_mean_quotient(one, figure) for one in compared) for figure in QUOTIENTS]
        marked = [f"{cached:+.1f}{'<' if cached < 0 else ''}"]
        marked += [f"{quotient:.2f}{'<' if quotient > 1 else ''}" for quotient in quotients]
        kind, cache, concurrency = cell
        lines.append(
            f"{kind:8} {cache:7} {concurrency:7} {router:24} {max(map(len, compared)):6}  {marked[0]:>14}  "
            + "  ".join(f"{text:>{len(figure)}}" for text, figure in zip(marked[1:], QUOTIENTS, strict=True))
        )
    return lines


def _mean_quotient(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], figure: str) -> float:
    """Ours divided by the peer's, as the geometric mean over the rounds."""
    return statistics.geometric_mean(max(ours[figure], 1e-9) / max(peer[figure], 1e-9) for ours, peer in pairs)


if __name__ == "__main__":
    main()
