"""CPU time of the server's event loop per token, at many streams: `python -m benchmarks.engine.streams`.

An engine serves the demo model in a process of its own. Each round opens so many chat streams at once over bare
sockets, and reads them to their ends in one thread. The figure is the CPU time of the event loop's thread per token,
its system calls included, as the median of the rounds. It must be at most `MUST_MS`. The CPU time of the server's other
threads and the rate are reported beside it. Linux only.
"""

from __future__ import annotations

import argparse
import json
import platform
import selectors
import socket
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from backend.demo_model import WEIGHTS
from benchmarks.engine.cpu import cpu_name
from benchmarks.engine.wire import RECEIVE_BYTES, TOKEN, children, cpu_of_threads
from benchmarks.warm_paths.stack import running

MUST_MS = 0.03  # of the event loop, per token
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "How do I make bread?"}]}),
    "completion": ("/v1/completions", {"prompt": "How do I make bread?"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of the event loop per token, at many streams.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine (default: %(default)s)")
    parser.add_argument("--result", type=Path, help="a file for the figures")
    args = parser.parse_args()
    machine = f"{cpu_name()}, {args.threads} threads, Python {platform.python_version()}"
    print(machine)
    command = [sys.executable, "-m", "backend", "--model", str(WEIGHTS), "--served-model-name", "m", "--port", "0"]
    command += ["--wait-for-kernels", "--num-threads", str(args.threads), "--max-num-seqs", str(args.streams)]
    figures: dict[str, dict[str, float]] = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        running(command, Path(directory) / "server", r"engine ready on (\S+) model") as url,
    ):
        for kind in KINDS:
            rounds = [measure(url, kind, args.streams, args.tokens) for _ in range(args.rounds + 1)][1:]
            figures[kind] = {name: round(statistics.median(r[name] for r in rounds), 4) for name in rounds[0]}
            print(kind, json.dumps(figures[kind]))
    holds = all(found["loop_ms"] <= MUST_MS for found in figures.values())
    print(f"at most {MUST_MS} ms of the event loop per token: {'holds' if holds else 'FAILS'}")
    if args.result:
        date = datetime.now(UTC).date().isoformat()
        result = {"machine": machine, "date": date, "rounds": args.rounds, "streams": args.streams, "figures": figures}
        args.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(url: str, kind: str, streams: int, tokens: int) -> dict[str, float]:
    """One round: milliseconds of CPU per token after the first token of each stream, and tokens per second."""
    parts = urlsplit(url)
    (server,) = children()
    with ExitStack() as sockets, selectors.DefaultSelector() as selector:
        clients = [
            sockets.enter_context(socket.create_connection((parts.hostname, parts.port))) for _ in range(streams)
        ]
        for client in clients:
            client.sendall(request(kind, tokens))
            selector.register(client, selectors.EVENT_READ)
        waiting = set(clients)
        received = 0
        while waiting:  # for the first token of each
            for key, _ in selector.select():
                data = key.fileobj.recv(RECEIVE_BYTES)  # type: ignore[union-attr]
                received += data.count(TOKEN)
                waiting.discard(key.fileobj)
        before, began, first = cpu_of_threads(server), time.perf_counter(), received
        while len(selector.get_map()):
            for key, _ in selector.select():
                data = key.fileobj.recv(RECEIVE_BYTES)  # type: ignore[union-attr]
                received += data.count(TOKEN)
                if data.endswith(b"0\r\n\r\n"):
                    selector.unregister(key.fileobj)
        seconds, after = time.perf_counter() - began, cpu_of_threads(server)
    used = {thread: spent - before.get(thread, 0.0) for thread, spent in after.items()}
    loop, count = used.pop(server), received - first
    return {
        "loop_ms": loop / count * 1e3,
        "other_threads_ms": sum(used.values()) / count * 1e3,
        "rate": count / seconds,
    }


def request(kind: str, tokens: int) -> bytes:
    """A request of one stream, as bytes of HTTP."""
    path, fields = KINDS[kind]
    fields = {"model": "m", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, **fields}
    body = json.dumps(fields).encode()
    return f"POST {path} HTTP/1.1\r\nhost: engine\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


if __name__ == "__main__":
    main()
