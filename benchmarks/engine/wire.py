"""Time per token over HTTP, beside the same token in process: `python -m benchmarks.engine.wire`.

One greedy sequence. An engine in this process and one behind HTTP generate a few dozen tokens alternately. A virtual
machine's memory may be a third slower a minute later, so the figure is the ratio within each round. The client reads
from a bare socket, which uses little of the cores that it shares with the engine. CPU time is reported separately for
the client and for the server's threads, for the fastest round. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import socket
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.engine.cpu import Load, cpu_name, load
from benchmarks.engine.peers import ours, servable
from benchmarks.engine.shapes import SHAPES, VOCAB_SIZE

PROMPT = 128
RECEIVE_BYTES = 1 << 16
TOKEN = b"data: {"
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Served:
    """Milliseconds per token of one request, after its first token."""

    wall: float
    loop_cpu: float  # of the server's event loop
    steps_cpu: float  # of all its other threads
    client_cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Time per token over HTTP, beside the same in process.")
    parser.add_argument("--shape", choices=[*SHAPES], default="tiny")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each engine (default: all)")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=32, help="tokens per round (default: %(default)s)")
    parser.add_argument("--result", type=Path, help="a file for the figures")
    args = parser.parse_args()
    machine = f"{cpu_name()}, {args.threads} threads, Python {platform.python_version()}"
    with tempfile.TemporaryDirectory() as directory:
        model = servable(args.shape, Path(directory) / "model")
        with ours(Path(directory) / "server", model, args.threads) as url:
            alone, served = measure(Load(load(model, args.threads), time.perf_counter), url, args.tokens, args.rounds)
    ratios = sorted(over.wall / each for each, over in zip(alone, served, strict=True))
    quarter = len(ratios) // 4
    best = min(served, key=lambda each: each.wall)
    figures = {
        "in_process_ms": {"best": min(alone), "median": statistics.median(alone)},
        "http_ms": {"best": best.wall, "median": statistics.median(each.wall for each in served)},
        "ratio": {"median": statistics.median(ratios), "quartiles": [ratios[quarter], ratios[-1 - quarter]]},
        "best": asdict(best),
    }
    print(machine, json.dumps(figures, indent=1), sep="\n")
    if args.result:
        date = datetime.now(UTC).date().isoformat()
        result = {"machine": machine, "date": date, "rounds": args.rounds, "figures": {args.shape: figures}}
        args.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(engine: Load, url: str, tokens: int, rounds: int) -> tuple[list[float], list[Served]]:
    """Milliseconds per token of each round, in process and over HTTP. The first round is a warm-up and not returned."""
    parts = urlsplit(url)
    (server,) = children()
    alone, served = [], []
    with socket.create_connection((parts.hostname, parts.port)) as client:
        for _ in range(rounds + 1):
            alone.append(in_process(engine, tokens))
            served.append(over_http(client, server, tokens))
    return alone[1:], served[1:]


def in_process(load: Load, tokens: int) -> float:
    load.add(load.prompt(PROMPT), tokens + 1)
    load.engine.step()
    began = time.perf_counter()
    load.finish()
    return (time.perf_counter() - began) / tokens * 1e3


def over_http(client: socket.socket, server: int, tokens: int) -> Served:
    prompt = [random.randrange(2, VOCAB_SIZE) for _ in range(PROMPT)]
    fields = {"model": "m", "prompt": prompt, "max_tokens": tokens + 1, "temperature": 0, "ignore_eos": True}
    body = json.dumps(fields | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: engine\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    received = b""
    while TOKEN not in received:
        received = client.recv(RECEIVE_BYTES)
    began = last = time.perf_counter()
    own, before = time.thread_time(), cpu_of_threads(server)
    while b"data: [DONE]" not in received:
        received = client.recv(RECEIVE_BYTES)
        last = time.perf_counter() if TOKEN in received else last
    client_cpu, after = time.thread_time() - own, cpu_of_threads(server)
    while not received.endswith(b"0\r\n\r\n"):
        received += client.recv(RECEIVE_BYTES)
    used = {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
    loop = used.pop(server)
    return Served(*(value / tokens * 1e3 for value in (last - began, loop, sum(used.values()), client_cpu)))


def cpu_of_threads(process: int) -> dict[int, float]:
    """CPU seconds by thread id. The main thread, which runs the event loop, has the id of the process."""
    threads = (PROC / str(process) / "task").iterdir()
    return {int(thread.name): int((thread / "schedstat").read_text().split()[0]) / 1e9 for thread in threads}


def children() -> list[int]:
    """Ids of the running child processes."""
    found = []
    for status in PROC.glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        except OSError:  # the process has ended
            continue
        if int(lines["PPid"]) == os.getpid() and not lines["State"].startswith("Z"):
            found.append(int(status.parent.name))
    return found


if __name__ == "__main__":
    main()
