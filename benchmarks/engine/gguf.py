"""The engine beside llama.cpp on the same GGUF file, over HTTP: `python -m benchmarks.engine.gguf --peer COMMAND`.

llama.cpp is not installed with Warmpath: `--peer` names the command `llama-server`, compiled for this CPU
(GGML_NATIVE). Wheels and packages are compiled for older CPUs, and then llama.cpp is two to eight times slower at
prompts. It runs as two servers, each with the settings that suit its load best: one with a single slot, and one with 16
slots and no shared KV cache. All servers run all the time, with the same file and number of threads, and the engine has
as many tokens of KV cache as each of the peer's servers. The client sends requests to them alternately, as in peers.py.
Figures are the best of all rounds, except `p99`.

    one, sixteen, ttft, warm: as in peers.py
    p99       seconds to the first token of 20 requests with 128 tokens, one after the other, while 8 background streams
              run (256 tokens in, 64 out) at a lower priority, which the peer does not have
    memory    resident memory of a server and its child processes after all requests, in MiB; of the peer's server
              with one slot
    start     seconds until the server is ready, with the file in the page cache
    large     the same for a file of 1.6 GB in Q4_K, with two threads

The weights are random numbers in a Llama shape of 303 million parameters, so speeds are real and texts are not. `large`
has 2.9 billion. The last lines are a table in Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from benchmarks.engine.cpu import cpu_name
from benchmarks.engine.peers import Load
from benchmarks.engine.shapes import VOCAB_SIZE
from benchmarks.warm_paths.stack import running
from benchmarks.warm_paths.vllm import free_ports
from tests.backend.gguf_writer import random_blocks

OURS, THEIRS = "warmpath", "llama.cpp"
KINDS = {kind.name: kind for kind in (Kind.Q8_0, Kind.Q4_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS)}
CACHE_TOKENS, SLOTS, BLOCK_TOKENS = 8192, 16, 16
STREAMS, BACKGROUND_PROMPT, BACKGROUND_OUTPUT, BACKGROUND_PRIORITY = 8, 256, 64, 10
CALLS, CALL_PROMPT = 20, 128
# Of each figure: whether more is better, its unit's factor for printing, and what the peer's multiple must be.
FIGURES = {
    "one": (True, 1.0, 1.0), "sixteen": (True, 1.0, 2.0), "ttft": (False, 1e3, 0.9), "warm": (False, 1e3, None),
    "p99": (False, 1e3, 0.25), "memory": (False, 1.0, None), "start": (False, 1.0, None),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a Llama model."""

    layers: int
    size: int
    inner: int
    heads: int
    kv_heads: int


SMALL, LARGE = Shape(24, 1024, 2816, 16, 4), Shape(28, 3072, 8192, 24, 8)


def write_model(path: Path, kind: Kind, shape: Shape = SMALL) -> Path:
    """Writes a Llama model with random weights, all matrices in this type. Its vocabulary is numbered words."""
    size, inner = shape.size, shape.inner
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CACHE_TOKENS)
    writer.add_embedding_length(size)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(size // shape.heads)
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["w", "1", *(f"w{i}" for i in range(VOCAB_SIZE - 2))])
    writer.add_token_types([1] * VOCAB_SIZE)
    writer.add_token_merges(["w 1"])
    writer.add_eos_token_id(1)
    kv = size // shape.heads * shape.kv_heads
    matrices = {"token_embd": (VOCAB_SIZE, size)}
    layer = {"attn_q": (size, size), "attn_k": (kv, size), "attn_v": (kv, size), "attn_output": (size, size)}
    layer |= {"ffn_gate": (inner, size), "ffn_up": (inner, size), "ffn_down": (size, inner)}
    matrices |= {f"blk.{i}.{name}": numbers for i in range(shape.layers) for name, numbers in layer.items()}
    # Layers of the large model have the same numbers, because drawing 1.6 GB takes long.
    drawn = cache(lambda seed, outs, ins: random_blocks(kind, outs, ins, seed))
    for seed, (name, (outs, ins)) in enumerate(matrices.items()):
        writer.add_tensor(f"{name}.weight", drawn(0 if shape is LARGE else seed, outs, ins), raw_dtype=kind)
    norms = [f"blk.{i}.{name}_norm" for i in range(shape.layers) for name in ("attn", "ffn")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))
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
def llama_server(command: str, folder: Path, model: Path, *, threads: int, slots: int) -> Iterator[str]:
    """Runs llama.cpp's server with CACHE_TOKENS of KV cache, divided evenly among its slots."""
    (port,) = free_ports(1)
    options = ["-m", str(model), "-t", str(threads), "-tb", str(threads), "-c", str(CACHE_TOKENS), "-np", str(slots)]
    options += ["--no-kv-unified", "--cache-ram", "0", "-fa", "on", "--host", "127.0.0.1", "--port", str(port)]
    with running([command, *options], folder, r"(server is listening|listening on)"):
        yield f"http://127.0.0.1:{port}"


def measure(loads: dict[str, tuple[Load, Load]], rounds: int, *, with_p99: bool) -> dict[str, dict[str, float]]:
    """Figures of each server, from its loads for a single request at once and for many."""
    found: dict[str, dict[str, float]] = {name: {} for name in loads}
    for single, _ in loads.values():
        single.tokens(single.prompt(64), 16)  # to warm up
    for _ in range(rounds):
        for name, (single, many) in loads.items():
            for _ in range(2):
                best(found[name], "one", single.one())
                ttft, warm = single.cold_and_warm()
                best(found[name], "ttft", ttft)
                best(found[name], "warm", warm)
            best(found[name], "sixteen", many.sixteen())
    for name, (_, many) in loads.items() if with_p99 else ():
        found[name]["p99"] = max(beside_background(many))  # of 20 calls, the 99th percentile is the largest
    return found


def best(found: dict[str, float], figure: str, value: float) -> None:
    choose = max if FIGURES[figure][0] else min
    found[figure] = choose(found.get(figure, value), value)


def beside_background(load: Load) -> list[float]:
    """Seconds to the first token of each interactive request, while background streams run."""
    stop = threading.Event()

    def stream() -> None:
        while not stop.is_set():
            load.tokens(load.prompt(BACKGROUND_PROMPT), BACKGROUND_OUTPUT, stop, priority=BACKGROUND_PRIORITY)

    threads = [threading.Thread(target=stream) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(1)  # until the streams run
        return [load.first(load.prompt(CALL_PROMPT)) for _ in range(CALLS)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def memory_mib(name: str) -> float:
    """Resident memory of the process with this text in its command line, and of its children where not shared."""
    processes = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            shares = (status.with_name("smaps_rollup")).read_text()
            command = status.with_name("cmdline").read_bytes().decode(errors="replace")
            resident, proportional = (int(shares.split(f"\n{key}:")[1].split()[0]) / 1024 for key in ("Rss", "Pss"))
            processes[int(fields["Pid"])] = (int(fields["PPid"]), command, resident, proportional)
    roots = [pid for pid, (_, command, *_) in processes.items() if name in command and "multiprocessing" not in command]
    total, parents = sum(processes[pid][2] for pid in roots), set(roots)
    while parents:
        parents = {pid for pid, (parent, *_) in processes.items() if parent in parents}
        total += sum(processes[pid][3] for pid in parents)
    return total


def compare(kind: Kind, threads: int, peer: str, rounds: int, *, with_p99: bool) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as servers:
        folder = Path(directory)
        model = write_model(folder / "model.gguf", kind)
        commands = {
            OURS: ours(folder / "ours", model, threads),
            THEIRS: llama_server(peer, folder / "one slot", model, threads=threads, slots=1),
            "many": llama_server(peer, folder / "many slots", model, threads=threads, slots=SLOTS),
        }
        urls, starts = {}, {}
        for name, command in commands.items():
            began = time.perf_counter()
            urls[name] = servers.enter_context(command)
            starts[name] = time.perf_counter() - began
        own, single, many = (Load(url) for url in urls.values())
        found = measure({OURS: (own, own), THEIRS: (single, many)}, rounds, with_p99=with_p99)
        commands_have = {OURS: f"backend\0--model\0{model}", THEIRS: f"--port\0{urls[THEIRS].rpartition(':')[2]}"}
        for name, text in commands_have.items():
            found[name] |= {"memory": memory_mib(text), "start": starts[name]}
    return found


def start_seconds(peer: str) -> dict[str, float]:
    """Seconds until each server is ready with the large model, at its second start."""
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        model = write_model(folder / "model.gguf", Kind.Q4_K, LARGE)
        for number in (1, 2):
            for name, command in {
                OURS: ours(folder / f"ours {number}", model, 2),
                THEIRS: llama_server(peer, folder / f"theirs {number}", model, threads=2, slots=1),
            }.items():
                began = time.perf_counter()
                with command:
                    found[name] = time.perf_counter() - began
    return found


def print_table(figures: dict[str, dict[str, dict[str, float]]]) -> None:
    """Prints the figures as a table in Markdown. A cell has ours, the peer's and their ratio."""
    print(f"\n| | {' | '.join(figures)} |\n|{'---|' * (1 + len(figures))}")
    for name, (_, scale, must) in FIGURES.items():
        if any(name not in found[OURS] for found in figures.values()):
            continue
        cells = []
        for found in figures.values():
            mine, peer = found[OURS][name], found[THEIRS][name]
            cells.append(f"{mine * scale:.4g} / {peer * scale:.4g} = {mine / peer:.2f}")
        print(f"| {name}{'' if must is None else f' (must {must})'} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="the command llama-server, compiled for this CPU")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=["Q8_0", "Q4_0", "Q4_K"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="without p99 and large, which take half of the time")
    parser.add_argument("--result", type=Path, help="a file for the figures")
    args = parser.parse_args()
    machine = f"{cpu_name()}, Python {platform.python_version()}"
    print(machine)
    figures = {}
    for kind in args.kinds:
        for threads in args.threads:
            found = compare(KINDS[kind], threads, args.peer, args.rounds, with_p99=not args.quick)
            figures[f"{kind}, {threads} threads"] = found
            print(f"\n{kind}, {threads} threads{'':>10}{OURS:>12}{THEIRS:>12}{'ratio':>8}")
            for name in found[OURS]:
                _, scale, must = FIGURES[name]
                mine, peer = found[OURS][name] * scale, found[THEIRS][name] * scale
                note = f"  must {must}" if must is not None else ""
                print(f"  {name:20}{mine:14.1f}{peer:12.1f}{mine / peer:8.2f}{note}", flush=True)
    large = {} if args.quick else start_seconds(args.peer)
    if large:
        print(f"\nlarge{'':27}{large[OURS]:12.1f}{large[THEIRS]:12.1f}{large[OURS] / large[THEIRS]:8.2f}")
    print_table(figures)
    if args.result:
        date = datetime.now(UTC).date().isoformat()
        result = {"machine": machine, "date": date, "figures": figures, "large start": large}
        args.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
