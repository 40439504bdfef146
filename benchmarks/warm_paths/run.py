"""Measures how many cached prefixes prefix affinity finds: replays conversations through the gateway to three engines.

All processes are real. Each conversation is replayed turn by turn, several at a time. The gateway salts every tenant's
prompts, as always. The runs combine two sizes of the KV caches, one that holds all conversations and one that does not,
with two strategies, round robin and prefix affinity. Each run starts with empty caches. The figures:

    cached        share of prompt tokens that the engines took from their caches, by their own usage
    ideal         the same for one infinite cache, over the same requests in the order in which they were sent
    TTFT          from the request to the first piece of text, at the client
    predicted     the router's prediction of cached tokens over what the engines reported, after a warm-up
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.warm_paths.conversations import BLOCK_TOKENS, ROOT, Conversation, InfiniteCache, conversations
from benchmarks.warm_paths.stack import MODEL, engine, gateway, key_of, long_demo_model, receipts

RESULTS = Path(__file__).parent / "results"
ENGINES = 3
STRATEGIES = ("round_robin", "prefix_affinity")
ANSWER_TOKENS = 4
REQUEST_SECONDS_MAX = 300.0
WARM_UP_SHARE = 0.25  # share of the requests that are sent before predictions count


@dataclass(frozen=True)
class Served:
    """One answered request. `messages` is the JSON of its prompt."""

    tenant: str
    sent_at: float
    ttft_seconds: float
    prompt_tokens: int
    cached_tokens: int
    messages: str


async def replay(url: str, work: list[Conversation], concurrency: int) -> list[Served]:
    """Replay all conversations, `concurrency` at a time. Each turn is sent when the one before is answered."""
    waiting = iter(work)
    served: list[Served] = []
    limits = httpx2.Limits(max_connections=concurrency)
    async with httpx2.AsyncClient(base_url=url, timeout=REQUEST_SECONDS_MAX, limits=limits) as client:

        async def worker() -> None:
            for conversation in waiting:
                for messages in conversation.turns():
                    served.append(await send(client, conversation.tenant, messages))

        await asyncio.gather(*(worker() for _ in range(concurrency)))
    return served


async def send(client: httpx2.AsyncClient, tenant: str, messages: list[dict[str, Any]]) -> Served:
    body = {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    headers = {"authorization": f"Bearer {key_of(tenant)}"}
    usage: dict[str, Any] = {}
    sent_at, ttft_seconds = time.monotonic(), 0.0
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"{reply.status_code}: {(await reply.aread()).decode()}")
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            if not ttft_seconds and any(choice["delta"].get("content") for choice in chunk["choices"]):
                ttft_seconds = time.monotonic() - sent_at
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    ttft_seconds = ttft_seconds or time.monotonic() - sent_at  # all its tokens were empty text
    return Served(tenant, sent_at, ttft_seconds, usage["prompt_tokens"], cached, json.dumps(messages))


class Tokenizer:
    """The engine's own tokenizer over HTTP. Tokenizes each prompt once."""

    def __init__(self, base_url: str) -> None:
        self._url = base_url.removesuffix("/v1") + "/tokenize"
        self._token_ids: dict[str, list[int]] = {}

    def ids_of(self, messages: str) -> list[int]:
        if messages not in self._token_ids:
            body = {"model": MODEL, "messages": json.loads(messages)}
            answer = httpx2.post(self._url, json=body, timeout=REQUEST_SECONDS_MAX).raise_for_status()
            self._token_ids[messages] = answer.json()["tokens"]
        return self._token_ids[messages]


def ideal_share(served: list[Served], tokenizer: Tokenizer) -> float:
    cache = InfiniteCache()
    in_order = sorted(served, key=lambda one: one.sent_at)
    cached = sum(cache.serve(one.tenant, tokenizer.ids_of(one.messages)) for one in in_order)
    return cached / sum(one.prompt_tokens for one in served)


def working_set_tokens(work: list[Conversation], tokenizer: Tokenizer) -> int:
    """Tokens that a cache must hold for all conversations. Counts prefixes that a tenant's conversations share once."""
    cache, total = InfiniteCache(), 0
    for conversation in work:
        ids = tokenizer.ids_of(json.dumps(list(conversation.turns())[-1]))
        total += len(ids) - cache.serve(conversation.tenant, ids)
    return total


def predictions(rows: list[dict[str, Any]]) -> dict[str, float]:
    late = rows[int(len(rows) * WARM_UP_SHARE) :]
    pairs = [(row["attempts"][-1]["predicted_cached_tokens"], row["cache_read"]) for row in late]
    reported = sum(actual for _, actual in pairs)
    return {
        "predicted_to_reported": round(sum(predicted for predicted, _ in pairs) / max(1, reported), 4),
        "mean_error_share": round(sum(abs(a - b) for a, b in pairs) / max(1, reported), 4),
    }


@contextlib.contextmanager
def engines_and_gateway(folder: Path, model: Path, num_blocks: int, strategy: str, tenants: list[str]) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        names = [f"engine-{letter}" for letter in "abcdefgh"[:ENGINES]]
        deployments = [stack.enter_context(engine(folder / name, model, num_blocks)) for name in names]
        url = stack.enter_context(gateway(folder / "gw", deployments, tenants, routing={"strategy": strategy}))
        yield url, Tokenizer(deployments[0]["base_url"])


def measure(
    folder: Path, model: Path, num_blocks: int, strategy: str, work: list[Conversation], concurrency: int
) -> dict[str, Any]:
    tenants = sorted({conversation.tenant for conversation in work})
    with engines_and_gateway(folder, model, num_blocks, strategy, tenants) as (url, tokenizer):
        began = time.monotonic()
        served = asyncio.run(replay(url, work, concurrency))
        seconds = time.monotonic() - began
        measured = figures(served, work, tokenizer, receipts(folder / "gw"), httpx2.get(f"{url}/metrics").text)
    cache_tokens = ENGINES * num_blocks * BLOCK_TOKENS
    return {"strategy": strategy, "cache_tokens": cache_tokens, "seconds": round(seconds, 1), **measured}


def figures(
    served: list[Served],
    work: list[Conversation],
    tokenizer: Tokenizer,
    rows: list[dict[str, Any]],
    metrics: str,
) -> dict[str, Any]:
    """Figures of one replay, from its client, the gateway's receipts (`rows`), and its metrics."""
    ttfts = sorted(one.ttft_seconds for one in served)
    return {
        "working_set_tokens": working_set_tokens(work, tokenizer),
        "requests": len(served),
        "cached": round(sum(one.cached_tokens for one in served) / sum(one.prompt_tokens for one in served), 4),
        "ideal": round(ideal_share(served, tokenizer), 4),
        "ttft_p50_ms": round(statistics.median(ttfts) * 1000, 1),
        "ttft_p90_ms": round(ttfts[int(0.9 * len(ttfts))] * 1000, 1),
        **predictions(rows),
        "kv_batches": _sum(metrics, "warmpath_kv_event_batches_total", 'kind="batches"'),
        "kv_gaps": _sum(metrics, "warmpath_kv_event_batches_total", 'kind="gaps"'),
        "kv_calls_known": _sum(metrics, "warmpath_kv_calls_total", 'blocks="known"'),
        "kv_calls_unknown": _sum(metrics, "warmpath_kv_calls_total", 'blocks="unknown"'),
    }


def _sum(metrics: str, name: str, label: str) -> int:
    lines = [line for line in metrics.splitlines() if line.startswith(name) and label in line]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines))


def machine() -> dict[str, Any]:
    with Path("/proc/cpuinfo").open() as cpuinfo:
        model = next((line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")), "unknown")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "cpu": model,
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 1),  # of the last minute, to show other load on the machine
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument(
        "--blocks", type=int, nargs="*", default=[6000, 576], help="KV cache blocks of each engine, for each size"
    )
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/warm_paths/results)")
    args = parser.parse_args()
    source, work = conversations(args.conversations, args.seed)
    runs: list[dict[str, Any]] = []
    for blocks, strategy in itertools.product(args.blocks, args.strategies):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            runs.append(measure(folder, long_demo_model(folder), blocks, strategy, work, args.concurrency))
        print(json.dumps(runs[-1]), flush=True)
    now = datetime.datetime.now(datetime.UTC)
    setup = {"trace": source, "engines": ENGINES, "concurrency": args.concurrency, "conversations": len(work)}
    result = {"at": now.isoformat(timespec="seconds"), "machine": machine(), **setup, "runs": runs}
    out = args.out or RESULTS
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{now:%Y%m%d-%H%M%S}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
