"""What block transfers between engines save a gateway's calls: `python -m benchmarks.warm_paths.kv_transfer`.

Replays conversations through the gateway to two engines with few slots each, so that many turns go to the engine that
does not have their conversation. In every other run, the policy allows transfers. Each run starts new processes with
empty caches. All of them are real, and share this machine. The figures:

    cached    share of prompt tokens that were not computed, by the engines' own usage
    loads     attempts that were to load blocks from the other engine
    TTFT      from the request to the first piece of text, at the client
    ideal     the same share for one infinite cache
    CPU       seconds of both engines and the gateway, their start included
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import resource
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.warm_paths.conversations import Conversation, conversations
from benchmarks.warm_paths.run import RESULTS, Tokenizer, ideal_share, machine, replay
from benchmarks.warm_paths.stack import LOADED_TOKENS_PER_SECOND, TRANSFERS, engine, gateway, long_demo_model

BLOCKS = 6000  # of each engine: more than all conversations have


def measure(work: list[Conversation], slots: int, concurrency: int, *, transfers: bool) -> dict[str, Any]:
    tenants = sorted({conversation.tenant for conversation in work})
    before = _children_cpu_seconds()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        model = long_demo_model(folder)
        deployments = [
            stack.enter_context(engine(folder / name, model, BLOCKS, *TRANSFERS)) | {"max_concurrency": slots}
            for name in ("a", "b")
        ]
        if transfers:
            deployments = [one | {"kv_transfer_tokens_per_second": LOADED_TOKENS_PER_SECOND} for one in deployments]
        url = stack.enter_context(gateway(folder / "gw", deployments, tenants))
        began = time.monotonic()
        served = asyncio.run(replay(url, work, concurrency))
        seconds = time.monotonic() - began
        ideal = ideal_share(served, Tokenizer(deployments[0]["base_url"]))
        loads = _metric(url, "warmpath_block_loads_total")
    ttfts = sorted(one.ttft_seconds for one in served)
    prompt_tokens = sum(one.prompt_tokens for one in served)
    return {
        "transfers": transfers,
        "requests": len(served),
        "loads": int(loads),
        "ideal": round(ideal, 4),
        "cached": round(sum(one.cached_tokens for one in served) / prompt_tokens, 4),
        "ttft_mean_ms": round(1000 * statistics.mean(ttfts), 1),
        "ttft_p50_ms": round(1000 * statistics.median(ttfts), 1),
        "ttft_p90_ms": round(1000 * ttfts[int(0.9 * len(ttfts))], 1),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(_children_cpu_seconds() - before, 1),
    }


def _children_cpu_seconds() -> float:
    """The CPU time of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _metric(url: str, name: str) -> float:
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--concurrency", type=int, default=6)
    parser.add_argument("--slots", type=int, default=2, help="calls that each deployment gets at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/warm_paths/results)")
    args = parser.parse_args()
    source, work = conversations(args.conversations, args.seed)
    runs = []
    for _ in range(args.rounds):
        for transfers in (False, True):
            runs.append(measure(work, args.slots, args.concurrency, transfers=transfers))
            print(json.dumps(runs[-1]), flush=True)
    now = datetime.datetime.now(datetime.UTC)
    setup = {"trace": source, "slots": args.slots, "concurrency": args.concurrency, "conversations": len(work)}
    result = {"at": now.isoformat(timespec="seconds"), "machine": machine(), **setup, "runs": runs}
    out = args.out or RESULTS
    out.mkdir(parents=True, exist_ok=True)
    (out / f"kv-transfer-{now:%Y%m%d-%H%M%S}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
