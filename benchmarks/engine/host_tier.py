"""Time to fetch a prompt's blocks back from the host tier, beside computing them and finding them in the cache.

    python -m benchmarks.engine.host_tier [--tokens 1024] [--rounds 9] [--file-in DIR] [--result FILE]

Measures the seconds until the first token of one prompt on the demo model. Each round sends the prompt three times:
when none of it is cached (`computed`), immediately again (`in the cache`), and after other prompts have evicted it
(`from the host tier`). Figures are medians of the thread's CPU time over all rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from backend.__main__ import DEMO_DIR
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from benchmarks.gateway.run import machine

HOST_BYTES = 1 << 28


def first_token_seconds(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """CPU seconds until the first token, and the number of the prompt's tokens that were cached."""
    request = Request("r", prompt, SamplingParams(max_tokens=1, temperature=0.0))
    start = time.thread_time()
    engine.add(request)
    while engine.has_unfinished:
        engine.step()
    return time.thread_time() - start, request.num_cached_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--file-in", type=Path, help="keep the tier in a file in this folder instead of RAM")
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    num_blocks = 2 * args.tokens // 16  # enough for the prompt and another one of its length
    engine = Engine.load(
        EngineConfig(
            model_dir=DEMO_DIR,
            num_threads=1,
            num_blocks=num_blocks,
            kv_host_bytes=HOST_BYTES,
            kv_host_dir=args.file_in,
        )
    )
    rng = random.Random(0)
    vocab_size = engine.config.model.vocab_size
    seconds: dict[str, list[float]] = {"computed": [], "in the cache": [], "from the host tier": []}
    for _ in range(args.rounds):
        prompt, *others = ([rng.randrange(vocab_size) for _ in range(args.tokens)] for _ in range(4))
        full = (args.tokens - 1) // 16 * 16
        for name, expected in (("computed", 0), ("in the cache", full), ("from the host tier", full)):
            if name == "from the host tier":
                for other in others:
                    first_token_seconds(engine, other)
            restored = engine.stats().host_blocks_restored_total
            spent, cached = first_token_seconds(engine, prompt)
            assert cached == expected
            assert (engine.stats().host_blocks_restored_total > restored) == (name == "from the host tier")
            seconds[name].append(spent)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        print(f"{name:20} {1000 * median:8.2f} ms  {median / medians['computed']:.3f} of computing")
    if args.result:
        result = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine() | {"torch": torch.__version__},
            "tokens": args.tokens,
            "tier": "a file" if args.file_in else "RAM",
            "milliseconds": {name: round(1000 * median, 3) for name, median in medians.items()},
        }
        args.result.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
