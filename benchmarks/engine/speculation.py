"""Speed-up of speculative decoding over the same engine without it, by draft method and batch size.

    python -m benchmarks.engine.speculation [--tokens 160] [--rounds 3] [--batches 1 4 16] [--result FILE]

Each kind and the plain engine alternate, on one machine in one run. The figures are the speed-up in tokens per second,
and the share of the draft tokens that were accepted. Models with random weights generate no predictable text, so for
most kinds the acceptance rate is set, while the costs are real:

    `told r`      a drafter that knows the answer, and is wrong about each token with probability 1 - r; in float32, in
                  which the answer does not depend on rounding
    draft model   the model's own first two of twelve layers; each of the other ten is scaled to a thousandth, so that
                  the two mostly agree
    ngram         prompt lookup, in answers that repeat the prompt because all but 64 tokens are forbidden
    demo, ngram   the answers of the bundled demo model, the only trained model here

`told 0.0` shows the cost that remains when speculation has turned itself off.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.engine.speculation.base import Drafter, DraftRequest
from backend.engine.speculation.speculator import Speculator
from benchmarks.engine.shapes import VOCAB_SIZE, make_checkpoint

DEMO = Path(__file__).parents[2] / "backend" / "demo_model" / "weights"
PROMPT_TOKENS = 128
RATES = (0.0, 0.5, 0.8, 0.95)
DRAFT_LAYERS = 2
FAINT = 1e-3
FEW = 64


class OracleDrafter(Drafter):
    """Knows the answers, and drafts each token correctly with probability `rate`."""

    def __init__(self, answers: dict[str, list[int]], rate: float) -> None:
        self._answers = answers
        self._rate = rate
        self._random = random.Random(0)

    def draft(self, wanted: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        return [self._draft(each.request, each.num_tokens) for each in wanted]

    def _draft(self, request: Request, count: int) -> tuple[int, ...]:
        rest = self._answers[request.request_id][request.num_output_tokens :][:count]
        return tuple(token if self._random.random() < self._rate else token ^ 1 for token in rest)


@dataclass(frozen=True)
class Kind:
    """An engine with speculation and one without, on the same requests."""

    plain: Engine
    speculating: Engine
    sampling: dict[str, Any]
    rate: float | None = None  # acceptance rate of the oracle drafter

    def compare(self, batch: int, tokens: int, rounds: int) -> dict[str, float]:
        plain, speculating = [], []
        answers = answer(self.plain, batch, tokens, self.sampling)[1]
        if self.rate is not None:
            oracle = OracleDrafter(answers, self.rate)
            self.speculating.speculator = Speculator(self.speculating.scheduler, oracle, 8)
        answer(self.speculating, batch, tokens, self.sampling)  # warm-up, in which the engine also learns the costs
        before = self.speculating.stats()
        for _ in range(rounds):
            plain.append(answer(self.plain, batch, tokens, self.sampling)[0])
            speculating.append(answer(self.speculating, batch, tokens, self.sampling)[0])
        after = self.speculating.stats()
        drafted = after.draft_tokens_total - before.draft_tokens_total
        accepted = sum(after.accepted_tokens_total) - sum(before.accepted_tokens_total)
        return {
            "times": round(statistics.median(plain) / statistics.median(speculating), 2),
            "plain, tok/s": round(batch * tokens / statistics.median(plain), 1),
            "drafted": drafted,
            "came true": round(accepted / drafted, 2) if drafted else 0.0,
        }


def answer(engine: Engine, batch: int, tokens: int, sampling: dict[str, Any]) -> tuple[float, dict[str, list[int]]]:
    """Answer a batch. Returns the seconds from the end of prefill to the last token, and the answers."""
    choose = random.Random(0)
    size = engine.config.model.vocab_size
    requests = [
        Request(
            f"r{i}",
            [choose.randrange(size) for _ in range(PROMPT_TOKENS)],
            SamplingParams(max_tokens=tokens, temperature=0.0, **sampling),
        )
        for i in range(batch)
    ]
    for request in requests:
        engine.add(request)
    while not all(request.num_output_tokens for request in requests):
        engine.step()
    started = time.perf_counter()
    while engine.has_unfinished:
        engine.step()
    seconds = time.perf_counter() - started
    return seconds, {request.request_id: request.token_ids[PROMPT_TOKENS:] for request in requests}


def faint_pair(model_dir: Path, target_dir: Path, draft_dir: Path) -> None:
    """Write a model whose layers after the first two add almost nothing, and a draft model of those two."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers[DRAFT_LAYERS:]:
            layer.self_attn.o_proj.weight.mul_(FAINT)
            layer.mlp.down_proj.weight.mul_(FAINT)
    model.save_pretrained(target_dir)
    model.model.layers = model.model.layers[:DRAFT_LAYERS]
    model.config.num_hidden_layers = DRAFT_LAYERS
    model.config.layer_types = model.config.layer_types[:DRAFT_LAYERS]
    model.save_pretrained(draft_dir)


def kinds(directory: Path, options: dict[str, Any]) -> dict[str, Callable[[], Kind]]:
    tiny = make_checkpoint("tiny", directory / "tiny")
    faint_pair(tiny, directory / "faint", directory / "draft")

    def load(model_dir: Path, **more: Any) -> Engine:
        return Engine.load(EngineConfig(model_dir=model_dir, enable_prefix_caching=False, **options, **more))

    def told(rate: float) -> Kind:
        return Kind(plain, load(tiny, dtype="float32"), {}, rate)

    plain = load(tiny, dtype="float32")
    few = {"logit_bias": dict.fromkeys(range(0, VOCAB_SIZE, VOCAB_SIZE // FEW), 100.0)}
    demo_load = {"max_num_batched_tokens": 512}
    faint = directory / "faint"
    return {
        **{f"told {rate}": partial(told, rate) for rate in RATES},
        "draft model": lambda: Kind(
            load(faint), load(faint, speculation="draft_model", draft_model_dir=directory / "draft"), {}
        ),
        "ngram": lambda: Kind(plain, load(tiny, dtype="float32", speculation="ngram"), few),
        "demo, ngram": lambda: Kind(load(DEMO, **demo_load), load(DEMO, speculation="ngram", **demo_load), {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="run only these kinds")
    parser.add_argument("--tokens", type=int, default=160, help="length of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--num-threads", type=int, help="threads per step (default: the engine's choice)")
    parser.add_argument("--result", type=Path, help="a file for the figures")
    args = parser.parse_args()
    figures: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, make in kinds(Path(directory), {"num_threads": args.num_threads}).items():
            if args.kinds and name not in args.kinds:
                continue
            kind = make()
            figures[name] = {}
            for batch in args.batches:
                found = figures[name][str(batch)] = kind.compare(batch, args.tokens, args.rounds)
                print(f"{name:14} batch {batch:3}  " + "  ".join(f"{key} {value}" for key, value in found.items()))
    machine = f"{os.cpu_count()} CPUs, torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}"
    print(machine)
    if args.result:
        result = {"machine": machine, "date": datetime.now(UTC).date().isoformat(), "by batch": figures}
        args.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
