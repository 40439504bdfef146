"""Quality cost of quantised weights and of a quantised KV cache: perplexity of the demo model on a fixed text.

    python -m benchmarks.engine.quality [--conversations 24] [--turns 12] [--result FILE]

The text consists of conversations in phrasings that were held out of training, generated from a fixed seed. The score
is over the tokens of the answers, given everything before them. Everything that is not quantised computes in float32,
so that a difference comes from the format alone. The last row is bfloat16 throughout, for comparison. `change` is in
percent of the first row, and `worst` is the largest difference in the log-probability of one token.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from backend.__main__ import DEMO_DIR
from backend.demo_model import corpus
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.server.model import ServedModel, load_model
from benchmarks.gateway.run import machine

SEED = 20_261
MAX_TOKENS = 2000  # per conversation
FORMS: dict[str, dict[str, str]] = {
    "as it is": {},
    "cache int8": {"kv_cache_dtype": "int8"},
    "cache fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"},
    "weights int8": {"quantization": "int8"},
    "weights int4": {"quantization": "int4"},
    "weights and cache int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
}


def conversation(model: ServedModel, rng: random.Random, turns: int) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and the positions of those in answers."""
    messages: list[dict[str, Any]] = []
    answers: list[int] = []
    ids: list[int] = []
    for _ in range(turns):
        question, answer = corpus.turn(corpus.question_answer(rng, held_out=True))
        before = encode(model, [*messages, question], add_generation_prompt=True)
        after = encode(model, [*messages, question, answer], add_generation_prompt=False)
        if len(after) > MAX_TOKENS:
            break
        assert after[: len(before)] == before, "the template does not render a prompt as the start of its answered form"
        answers += range(len(before), len(after) - 1)  # without the newline after the last token
        messages += [question, answer]
        ids = after
    return ids, answers


def encode(model: ServedModel, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> list[int]:
    text = model.template.render(messages, add_generation_prompt=add_generation_prompt)
    return model.codec.encode(text, add_special_tokens=False)


def logprobs(texts: Sequence[tuple[list[int], list[int]]], options: dict[str, Any]) -> Iterator[float]:
    """Natural log-probabilities of the tokens of the answers."""
    config = EngineConfig(model_dir=DEMO_DIR, num_blocks=1024, num_threads=1, **{"dtype": "float32", **options})
    engine = Engine.load(config)
    for ids, answers in texts:
        engine.add(Request("r", ids, SamplingParams(max_tokens=0, prompt_logprobs=0)))
        while engine.has_unfinished:
            for output in engine.step():
                found = [logprob.logprob for logprob in output.prompt_logprobs or ()]
                yield from (found[position - 1] for position in answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    rng = random.Random(SEED)
    model = load_model(DEMO_DIR, "demo", "demo", MAX_TOKENS)
    texts = [conversation(model, rng, args.turns) for _ in range(args.conversations)]
    rows: list[dict[str, Any]] = []
    exact: list[float] = []
    for name, options in FORMS.items():
        found = list(logprobs(texts, options))
        exact = exact or found
        perplexity = math.exp(-sum(found) / len(found))
        change = perplexity / (rows[0]["perplexity"] if rows else perplexity) - 1
        worst = max(abs(a - b) for a, b in zip(found, exact, strict=True))
        rows.append({"form": name, "perplexity": perplexity, "change_percent": 100 * change, "worst": worst})
        print(f"{name:24} perplexity {perplexity:.5f}  change {100 * change:+.3f} %  worst {worst:.3f}", flush=True)
    result = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine() | {"torch": torch.__version__},
        "tokens": sum(len(ids) for ids, _ in texts),
        "tokens_scored": len(exact),
        "rows": rows,
    }
    print(f"{result['tokens_scored']} tokens of answers, among {result['tokens']}")
    if args.result:
        args.result.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
