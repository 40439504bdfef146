"""The engine beside llama.cpp on the same GGUF file, over HTTP: `python -m benchmarks.engine.gguf --peer PYTHON`.

llama.cpp is not installed with Warmpath: `--peer` names the Python of an environment that has the package xllamacpp.
Both run as servers all the time, with the same file, number of threads and tokens of KV cache. The client sends
requests to them alternately, as in peers.py. `rss` is the memory of each server after all requests, in MiB.

The weights are random numbers in a Llama shape of 303 million parameters, so speeds are real and texts are not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from benchmarks.engine.cpu import cpu_name
from benchmarks.engine.peers import FIGURES, measure
from benchmarks.engine.shapes import VOCAB_SIZE
from benchmarks.warm_paths.stack import running
from tests.backend.gguf_writer import random_blocks

OURS, THEIRS = "warmpath", "llama.cpp"
KINDS = {kind.name: kind for kind in (Kind.Q8_0, Kind.Q4_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS)}
LAYERS, SIZE, INNER, HEADS, KV_HEADS = 24, 1024, 2816, 16, 4
CACHE_TOKENS, SLOTS, BLOCK_TOKENS = 8192, 16, 16
PEER = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, threads = sys.argv[1], int(sys.argv[2])
params.n_ctx, params.n_parallel, params.kv_unified, params.n_gpu_layers = int(sys.argv[3]), int(sys.argv[4]), True, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.cache_ram_mib, params.port = 0, 0
server = xllamacpp.Server(params)
print("listening on", server.listening_address, flush=True)
time.sleep(1e6)
"""


def write_model(path: Path, kind: Kind) -> Path:
    """Writes a Llama model with random weights, all matrices in this type. Its vocabulary is numbered words."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CACHE_TOKENS)
    writer.add_embedding_length(SIZE)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(SIZE // HEADS)
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["w", "1", *(f"w{i}" for i in range(VOCAB_SIZE - 2))])
    writer.add_token_types([1] * VOCAB_SIZE)
    writer.add_token_merges(["w 1"])
    writer.add_eos_token_id(1)
    kv = SIZE // HEADS * KV_HEADS
    shapes = {"token_embd": (VOCAB_SIZE, SIZE)}
    layer = {"attn_q": (SIZE, SIZE), "attn_k": (kv, SIZE), "attn_v": (kv, SIZE), "attn_output": (SIZE, SIZE)}
    layer |= {"ffn_gate": (INNER, SIZE), "ffn_up": (INNER, SIZE), "ffn_down": (SIZE, INNER)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    for seed, (name, shape) in enumerate(shapes.items()):
        writer.add_tensor(f"{name}.weight", random_blocks(kind, *shape, seed), raw_dtype=kind)
    norms = [f"blk.{i}.{name}_norm" for i in range(LAYERS) for name in ("attn", "ffn")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(SIZE, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@contextlib.contextmanager
def ours(folder: Path, model: Path, threads: int) -> Iterator[str]:
    command = [sys.executable, "-m", "backend", "--model", str(model), "--served-model-name", "m", "--port", "0"]
    command.append("--wait-for-kernels")
    command += ["--num-threads", str(threads), "--num-blocks", str(CACHE_TOKENS // BLOCK_TOKENS)]
    with running(command, folder, r"engine ready on (\S+) model") as url:
        yield url


@contextlib.contextmanager
def theirs(python: str, folder: Path, model: Path, threads: int) -> Iterator[str]:
    command = [python, "-c", PEER, str(model), str(threads), str(CACHE_TOKENS), str(SLOTS)]
    with running(command, folder, r"listening on (\S+)") as url:
        yield url


def rss_mib(name: str) -> float:
    """The memory of the process that has this text in its command line."""
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            command = status.with_name("cmdline").read_bytes().decode(errors="replace")
            if name in command and "multiprocessing" not in command:
                return int(status.read_text().split("VmRSS:")[1].split()[0]) / 1024
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="Python of an environment with xllamacpp")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=["Q8_0", "Q4_0", "Q4_K"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--result", type=Path, help="a file for the figures")
    args = parser.parse_args()
    machine = f"{cpu_name()}, Python {platform.python_version()}"
    print(machine)
    figures = {}
    for kind in args.kinds:
        for threads in args.threads:
            with tempfile.TemporaryDirectory() as directory:
                model = write_model(Path(directory) / "model.gguf", KINDS[kind])
                with (
                    ours(Path(directory) / "ours", model, threads) as url,
                    theirs(args.peer, Path(directory) / "theirs", model, threads) as peer_url,
                ):
                    found = measure({OURS: url, THEIRS: peer_url}, args.rounds)
                    found[OURS]["rss"] = rss_mib(f"backend\0--model\0{model}")
                    found[THEIRS]["rss"] = rss_mib(f"{model}\0{threads}\0")
            figures[f"{kind}, {threads} threads"] = found
            print(f"\n{kind}, {threads} threads{'':>10}{OURS:>12}{THEIRS:>12}{'ratio':>8}")
            for name in (*FIGURES, "rss"):
                mine, peer = found[OURS][name], found[THEIRS][name]
                scale = 1e3 if name in ("ttft", "warm") else 1.0
                print(f"  {name:20}{mine * scale:14.1f}{peer * scale:12.1f}{mine / peer:8.2f}", flush=True)
    if args.result:
        result = {"machine": machine, "date": datetime.now(UTC).date().isoformat(), "figures": figures}
        args.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
