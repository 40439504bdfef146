"""Perplexity of one GGUF file by the engine and by llama.cpp: `python -m benchmarks.engine.perplexity --peer COMMAND`.

The model is the demo model. Its hidden size is padded with zeros from 192 to 256, which does not change what it
computes, because the blocks of Q4_K and Q6_K have 256 weights. The text is that of quality.py, conversations in
phrasings that were held out of training; here every token is scored, questions included. Both get the same token ids.

    exact       the file's weights in float32, computed by the engine: what both approximate
    warmpath    the weights in their own type, multiplied by the kernels
    llama.cpp   log-probabilities of the next token from its server, one request for each token
    difference  of the two perplexities, in percent. The script exits with 1 if one is above 0.5.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from backend.__main__ import DEMO_DIR
from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.request import Request
from backend.engine.sampling_params import SamplingParams
from backend.server.model import load_model
from benchmarks.engine.cpu import cpu_name
from benchmarks.engine.gguf import llama_server
from benchmarks.engine.k_quants import Array, quantize
from benchmarks.engine.quality import MAX_TOKENS, conversation
from tests.backend.gguf_writer import tokenizer_fields, write_gguf

SEED = 20_262
KINDS = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_K, Kind.Q6_K)
PADDED_SIZE = 256
MAX_DIFFERENCE = 0.005


def padded_demo_model(directory: Path) -> Path:
    """Writes the demo model with PADDED_SIZE hidden numbers, of which the last ones are always zero."""
    shutil.copytree(DEMO_DIR, directory)
    config = json.loads((directory / "config.json").read_text())
    size = config["hidden_size"]
    shrinks = size / PADDED_SIZE  # the mean of squares that a norm divides by
    config |= {"hidden_size": PADDED_SIZE, "rms_norm_eps": config["rms_norm_eps"] * shrinks}
    (directory / "config.json").write_text(json.dumps(config))

    def padded(name: str, weight: Tensor) -> Tensor:
        weight = weight.float()
        if weight.ndim == 1:
            return pad(weight * math.sqrt(shrinks), (0, PADDED_SIZE - size)) if len(weight) == size else weight
        outs, ins = weight.shape
        is_output = outs == size
        return pad(weight, (0, PADDED_SIZE - ins if ins == size else 0, 0, PADDED_SIZE - outs if is_output else 0))

    tensors = load_file(directory / "model.safetensors")
    save_file({name: padded(name, weight) for name, weight in tensors.items()}, directory / "model.safetensors")
    return directory


def write_model(directory: Path, path: Path, kind: Kind) -> Path:
    def quantized(name: str, values: Array) -> tuple[Array, Kind]:
        return (values, Kind.F32) if values.ndim == 1 else (quantize(values, kind), kind)

    return write_gguf(directory, path, quantized, tokenizer_fields(directory, "qwen2"))


def ours(model: Path, texts: list[list[int]], dtype: str) -> Iterator[float]:
    """Natural log-probabilities of all tokens except the first of each text."""
    engine = Engine.load(EngineConfig(model_dir=model, num_blocks=256, num_threads=1, dtype=dtype))
    for ids in texts:
        engine.add(Request("r", ids, SamplingParams(max_tokens=0, prompt_logprobs=0)))
        while engine.has_unfinished:
            for output in engine.step():
                yield from (found.logprob for found in output.prompt_logprobs or ())


def theirs(url: str, texts: list[list[int]], vocab_size: int) -> Iterator[float]:
    with httpx2.Client(base_url=url, timeout=60.0) as client:
        for ids in texts:
            for i in range(1, len(ids)):
                body: dict[str, Any] = {"prompt": ids[:i], "n_predict": 1, "n_probs": vocab_size, "cache_prompt": True}
                # Probabilities are those of the logits. Without `ignore_eos`, a drawn end token has none.
                body |= {"temperature": 0, "ignore_eos": True}
                reply = client.post("/completion", json=body)
                reply.raise_for_status()
                (found,) = reply.json()["completion_probabilities"]
                yield next(one["logprob"] for one in found["top_logprobs"] if one["id"] == ids[i])


def perplexity(logprobs: Iterator[float]) -> float:
    found = list(logprobs)
    return math.exp(-sum(found) / len(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="the command llama-server, compiled for any CPU")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    rng = random.Random(SEED)
    demo = load_model(DEMO_DIR, "demo", "demo", MAX_TOKENS)
    texts = [conversation(demo, rng, 3)[0] for _ in range(args.conversations)]
    rows: dict[str, dict[str, float]] = {}
    num_scored = sum(len(ids) - 1 for ids in texts)
    print(f"{num_scored} tokens{'':7}{'exact':>12}{'warmpath':>12}{'llama.cpp':>12}{'difference':>12}")
    with tempfile.TemporaryDirectory() as folder:
        directory = padded_demo_model(Path(folder) / "padded")
        vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
        for kind in KINDS:
            path = write_model(directory, Path(folder) / f"{kind.name}.gguf", kind)
            exact, mine = (perplexity(ours(path, texts, dtype)) for dtype in ("float32", "bfloat16"))
            with llama_server(args.peer, Path(folder) / f"{kind.name} server", path, threads=1, slots=1) as url:
                peer = perplexity(theirs(url, texts, vocab_size))
            difference = mine / peer - 1
            rows[kind.name] = {"exact": exact, "warmpath": mine, "llama.cpp": peer, "difference": difference}
            print(f"{kind.name:18}{exact:12.5f}{mine:12.5f}{peer:12.5f}{100 * difference:+11.3f}%", flush=True)
    if args.result:
        date = datetime.now(UTC).date().isoformat()
        result = {"machine": cpu_name(), "date": date, "tokens": num_scored, "perplexity": rows}
        args.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(abs(row["difference"]) > MAX_DIFFERENCE for row in rows.values()))


if __name__ == "__main__":
    main()
