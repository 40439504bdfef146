"""What structured output costs: 16 constrained rows beside 16 that are not, `python -m benchmarks.engine.structured`.

One engine with the 100 M model of random weights and a vocabulary of 32,000 tokens, trained on the source of Python's
standard library. In each round, the kinds take turns. Every kind has 16 requests at once and generates as many tokens,
so the figure is the ratio of the times, as the median of the rounds. It must be at most `MUST` for each kind. Requests
of one grammar share no computation of masks, and each grammar is compiled before.

    text        a regular expression that allows any text: no token is forced, so each one needs a mask
    strings     an object with long strings
    records     a list of small objects, most of whose tokens are forced (jump-forward)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sysconfig
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from backend.engine import grammar
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.grammar import CompiledGrammar, GrammarCompiler
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from benchmarks.engine.cpu import cpu_name
from benchmarks.engine.shapes import SHAPES, VOCAB_SIZE, make_checkpoint

MUST = 1.1  # times the unconstrained rows
ROWS, PROMPT_TOKENS = 16, 64
CORPUS_FILES = 150  # of the standard library
TEXT = {"type": "string", "minLength": 2000}
RECORD = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 10, "maximum": 99},
        "available": {"type": "boolean"},
        "category": {"enum": ["books", "music", "films"]},
    },
    "required": ["identifier", "available", "category"],
    "additionalProperties": False,
}
KINDS: dict[str, str | None] = {
    "free": None,
    "text": grammar.regex(r"(?s:.*)THE END"),
    "strings": grammar.json_schema({"type": "object", "properties": {"text": TEXT}, "required": ["text"]}),
    "records": grammar.json_schema({"type": "array", "items": RECORD, "minItems": 1000}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What structured output costs.")
    parser.add_argument("--shape", choices=[*SHAPES], default="tiny")
    parser.add_argument("--tokens", type=int, default=64, help="of each request (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of the engine (default: all)")
    parser.add_argument("--result", type=Path, help="a file for the figures")
    args = parser.parse_args()
    machine = f"{cpu_name()}, {args.threads} threads, Python {platform.python_version()}"
    print(machine)
    compiler = GrammarCompiler(train_tokenizer(VOCAB_SIZE).to_str(), VOCAB_SIZE, [0])
    compiled = {kind: compiler.compile(text) if text else None for kind, text in KINDS.items()}
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_checkpoint(args.shape, Path(directory) / "model")
        engine = Engine.load(EngineConfig(model_dir=model_dir, device="cpu", num_threads=args.threads, num_blocks=1024))
        rounds = [
            {kind: seconds(engine, each, args.tokens) for kind, each in compiled.items()}
            for _ in range(args.rounds + 1)
        ][1:]
    compiler.close()
    ratios = {k: statistics.median(found[k] / found["free"] for found in rounds) for k in KINDS if k != "free"}
    rate = ROWS * args.tokens / statistics.median(found["free"] for found in rounds)
    print(f"unconstrained: {rate:.0f} tokens/s")
    for kind, ratio in ratios.items():
        print(
            f"{kind:10} {ratio:.3f} times the unconstrained rows; must: {MUST}: {'holds' if ratio <= MUST else 'FAILS'}"
        )
    if args.result:
        date = datetime.now(UTC).date().isoformat()
        result = {"machine": machine, "date": date, "rounds": args.rounds, "rate": rate, "ratios": ratios}
        args.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def seconds(engine: Engine, compiled: CompiledGrammar | None, tokens: int) -> float:
    """The time of 16 requests at once, from their submission to the last token."""
    requests = []
    for row in range(ROWS):
        prompt = [(row * 7919 + i * 104_729 + time.perf_counter_ns()) % VOCAB_SIZE for i in range(PROMPT_TOKENS)]
        sampling = SamplingParams(max_tokens=tokens, temperature=1.0, seed=row)
        started = compiled.start() if compiled else None
        requests.append(Request(f"r{time.perf_counter_ns()}", prompt, sampling, grammar=started))
    began = time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        engine.step()
    assert all(request.num_output_tokens == tokens for request in requests), "an answer ended early"
    return time.perf_counter() - began


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE as real models have, trained on Python's standard library. Takes some seconds."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.py"))[:CORPUS_FILES])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


if __name__ == "__main__":
    main()
