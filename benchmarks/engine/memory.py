"""Share of the allocated KV cache that holds no token: partly filled blocks, and blocks of prompts still in prefill.

    python -m benchmarks.engine.memory [--requests 128] [--block-size 16] [--result FILE]

The demo model answers requests of 100 to 1024 tokens in and out, with a common system prompt, in a cache too small for
all of them, so that some are preempted. After each step, the blocks in use are counted, shared ones once, and the
tokens in them. `waste` is the share of their token positions that are empty, over all steps. For comparison it shows
the waste, on the same steps, of engines without blocks, which reserve one row per request: as long as its prompt and
answer may become (`its own longest`), or as long as the context (`the context`).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from backend.__main__ import DEMO_DIR
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from benchmarks.gateway.run import machine

SEED = 20_261
SHARED_TOKENS = 64
LENGTHS = (100, 1024)
NUM_BLOCKS_OF_16 = 1024  # for some 16,000 tokens
MAX_NUM_SEQS = 32


@dataclass(slots=True)
class Slots:
    """Sums over all steps."""

    held: int = 0  # tokens whose keys and values are in the cache
    handed_out: int = 0
    at_its_longest: int = 0
    at_the_context: int = 0


def make_requests(count: int, vocab_size: int) -> list[Request]:
    rng = random.Random(SEED)
    shared = [rng.randrange(vocab_size) for _ in range(SHARED_TOKENS)]
    requests = []
    for i in range(count):
        num_prompt, num_output = rng.randint(*LENGTHS), rng.randint(*LENGTHS)
        prompt = shared + [rng.randrange(vocab_size) for _ in range(num_prompt - len(shared))]
        # No stop token or stop string, so that every answer has the length that was drawn.
        requests.append(Request(f"r{i}", prompt, SamplingParams(max_tokens=num_output, seed=i)))
    return requests


def count(slots: Slots, running: Sequence[Request], block_size: int, context: int) -> None:
    tokens_in: dict[int, int] = {}  # by block
    for request in running:
        for i, block in enumerate(request.block_table):
            held = min(max(request.num_computed_tokens - i * block_size, 0), block_size)
            tokens_in[block] = max(tokens_in.get(block, 0), held)
        slots.at_its_longest += request.max_total_tokens
    slots.held += sum(tokens_in.values())
    slots.handed_out += len(tokens_in) * block_size
    slots.at_the_context += len(running) * context


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    config = EngineConfig(
        model_dir=DEMO_DIR,
        block_size=args.block_size,
        num_blocks=NUM_BLOCKS_OF_16 * 16 // args.block_size,
        max_num_seqs=MAX_NUM_SEQS,
        max_waiting=args.requests,
    )
    engine = Engine.load(config)
    for request in make_requests(args.requests, engine.config.model.vocab_size):
        engine.add(request)
    slots, num_steps = Slots(), 0
    context = engine.config.model.max_position_embeddings
    while engine.has_unfinished:
        engine.step()
        count(slots, engine.scheduler.running, args.block_size, context)
        num_steps += 1
    engine.check_integrity()
    stats = engine.stats()
    waste = {
        "blocks": 1 - slots.held / slots.handed_out,
        "its own longest": 1 - slots.held / slots.at_its_longest,
        "the context": 1 - slots.held / slots.at_the_context,
    }
    for name, share in waste.items():
        print(f"waste by {name:16} {100 * share:6.2f} %")
    print(f"{num_steps} steps, {stats.generation_tokens_total} tokens generated, {stats.preemptions_total} preemptions")
    if args.result:
        result = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine() | {"torch": torch.__version__},
            "requests": args.requests,
            "block_size": args.block_size,
            "steps": num_steps,
            "generation_tokens": stats.generation_tokens_total,
            "preemptions": stats.preemptions_total,
            "waste_percent": {name: round(100 * share, 3) for name, share in waste.items()},
        }
        args.result.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
