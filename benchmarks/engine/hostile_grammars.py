"""What hostile grammars cost other streams: `python -m benchmarks.engine.hostile_grammars [--model DIR] [--rounds 5]`.

An engine server runs in a process of its own. An innocent tenant reads one stream after another and notes the longest
gap between two chunks: first alone, then while a dozen hostile requests of other tenants are sent again and again.
Streams without a grammar and streams that follow a schema take turns. The figure is the ratio of the longest gaps, as
the median over the rounds: it must stay below 3. The hostile requests must each be refused or end alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from backend.demo_model import WEIGHTS
from benchmarks.warm_paths.stack import running

READY = r"engine ready on (\S+) model"
RECEIVE_BYTES = 1 << 16
PAUSE_SECONDS = 0.2  # between two hostile requests of a tenant
STREAMS = 4  # per round and load, one after another
TOKENS = 200
LIMIT = 3.0
PLAIN: dict[str, Any] = {"ignore_eos": True}
SCHEMA: dict[str, Any] = {"structured_outputs": {"regex": "[a-z ]{2000}"}}


def schema(value: Any, *, strict: bool = True) -> dict[str, Any]:
    named = {"name": "hostile", "schema": value, "strict": strict}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def grammar(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"grammar": text}}


def regex(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": text}}


def doubling(count: int) -> str:
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(count)) + f'\nr{count}: "a"'


def nested(depth: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    return value


HOSTILE: dict[str, dict[str, Any]] = {
    "nested repetitions": regex("(z{2000}){2000}"),
    "nested optional repetitions": regex("((a{0,200}){0,200}){0,200}"),
    "a long text": regex("a" * 400_000),
    "long alternatives": schema({"enum": ["x" * 9000 + str(i) for i in range(50)]}),
    "a huge enum": schema({"enum": [f"v{i}" for i in range(200_000)]}),
    "thousands of anyOf": schema(
        {"anyOf": [{"properties": {"a": {"type": "string"}, f"b{i}": {"type": "integer"}}} for i in range(2000)]}
    ),
    "patterns of properties": schema(
        {"type": "object", "patternProperties": {f"^(a|b)*{i}(a|b){{12}}$": {} for i in range(2000)}}
    ),
    "recursive references": schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "deep nesting": schema(nested(400)),
    "gigantic lengths": schema({"type": "string", "minLength": 10**6, "maxLength": 10**9}),
    "doubling rules": grammar(doubling(30)),
    "an ambiguous grammar": grammar('start: s\ns: s s | s s s | "a" | ""'),
    "a long GBNF grammar": grammar("root ::= " + " | ".join(f'"a{i}"' for i in range(40_000))),
    "GBNF parentheses": grammar("root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
}


class Client:
    """A client of the engine. Reads from a bare socket, which takes little of the CPU time of the engine.

    Each request has a connection of its own, because the engine closes one that is idle while the machine is busy.
    """

    def __init__(self, url: str, salt: str) -> None:
        parts = urlsplit(url)
        self._salt = salt
        self._address = parts.hostname, parts.port

    def stream(self, fields: dict[str, Any]) -> tuple[str, list[float]]:
        """Sends one request. Returns its status, or `ended alone` for an error in the stream and its chunks' times."""
        return self.send(json.dumps({"prompt": "Once", "stream": True, "cache_salt": self._salt} | fields).encode())

    def send(self, body: bytes) -> tuple[str, list[float]]:
        """Sends one body."""
        head = f"POST /v1/completions HTTP/1.1\r\nhost: engine\r\ncontent-length: {len(body)}\r\n\r\n"
        received, times = b"", []
        with socket.create_connection(self._address) as connection:
            connection.sendall(head.encode() + body)
            while not (received.endswith((b"0\r\n\r\n", b"}")) and self._is_complete(received)):
                data = connection.recv(RECEIVE_BYTES)
                assert data, "the server closed the connection"
                times += [time.perf_counter()] if b"data: {" in data else []
                received += data
        status = received.split(b" ", 2)[1].decode()
        return "ended alone" if b'data: {"error"' in received else status, times

    @staticmethod
    def _is_complete(received: bytes) -> bool:
        head, _, body = received.partition(b"\r\n\r\n")
        length = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        return len(body) >= int(length[0]) if length else body.endswith(b"0\r\n\r\n")


class Attack:
    """A process that sends the hostile requests until `stop`, so that its work does not delay the reader of streams."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-m", "benchmarks.engine.hostile_grammars", "--attack", url]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has begun

    def stop(self) -> Counter[str]:
        """Ends the attack. Returns the number of answers by request and status."""
        answers, _ = self._process.communicate("")
        return Counter(json.loads(answers))


def attack(url: str) -> None:
    """Sends each hostile request again and again, each as a tenant of its own, until stdin is closed."""
    os.nice(19)
    answers, stopped = Counter[str](), threading.Event()

    def run(name: str) -> None:
        client = Client(url, name)
        fields = {"prompt": "Once", "stream": True, "cache_salt": name, "max_tokens": 64}
        body = json.dumps(fields | HOSTILE[name]).encode()
        ready.wait()
        while not stopped.is_set():
            status, _ = client.send(body)
            answers[f"{name}: {status}"] += 1
            stopped.wait(PAUSE_SECONDS)

    ready = threading.Barrier(len(HOSTILE) + 1)
    threads = [threading.Thread(target=run, args=(name,)) for name in HOSTILE]
    for thread in threads:
        thread.start()
    ready.wait()
    print("begun", flush=True)
    sys.stdin.read()
    stopped.set()
    for thread in threads:
        thread.join()
    print(json.dumps(answers))


def longest_gap(client: Client, fields: dict[str, Any]) -> float:
    """The longest time between two chunks of some streams, in milliseconds."""
    longest = 0.0
    for seed in range(STREAMS):
        status, times = client.stream({"max_tokens": TOKENS, "seed": seed, "temperature": 1.0} | fields)
        assert status == "200", status
        longest = max([longest, *(after - before for before, after in itertools.pairwise(times))])
    return longest * 1e3


def measure(url: str, rounds: int) -> dict[str, Any]:
    innocent, answers = Client(url, "innocent"), Counter[str]()
    kinds = {"without a grammar": PLAIN, "with a grammar": SCHEMA}
    gaps: dict[str, dict[str, list[float]]] = {kind: {"alone": [], "beside": []} for kind in kinds}
    for fields in kinds.values():
        longest_gap(innocent, fields)  # to warm up
    for _ in range(rounds):
        for kind, fields in kinds.items():
            gaps[kind]["alone"].append(longest_gap(innocent, fields))
        hostile = Attack(url)
        time.sleep(PAUSE_SECONDS)
        for kind, fields in kinds.items():
            gaps[kind]["beside"].append(longest_gap(innocent, fields))
        answers += hostile.stop()
    figures: dict[str, Any] = {}
    for kind, measured in gaps.items():
        alone, beside = (statistics.median(measured[load]) for load in ("alone", "beside"))
        figures[kind] = {
            "longest gap alone, ms": round(alone, 2),
            "longest gap beside, ms": round(beside, 2),
            "ratio": round(beside / alone, 2),
        }
    figures["hostile requests"] = dict(sorted(answers.items()))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="What hostile grammars cost other streams.")
    parser.add_argument("--model", type=Path, default=WEIGHTS, help="a checkpoint (default: the demo model)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--result", type=Path, help="a file for the figures")
    parser.add_argument("--attack", metavar="URL", help="only send the hostile requests, until stdin is closed")
    args = parser.parse_args()
    if args.attack:
        attack(args.attack)
        return
    command = [sys.executable, "-m", "backend", "--model", str(args.model), "--served-model-name", "m", "--port", "0"]
    command.append("--wait-for-kernels")
    command += ["--num-threads", str(args.threads)]
    with tempfile.TemporaryDirectory() as directory, running(command, Path(directory) / "server", READY) as url:
        figures = measure(url, args.rounds)
    machine = f"{os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f}"
    print(machine, json.dumps(figures, indent=1), sep="\n")
    if args.result:
        date = datetime.now(UTC).date().isoformat()
        result = {"machine": machine, "date": date, "rounds": args.rounds, "figures": figures}
        args.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for kind in ("without a grammar", "with a grammar"):
        assert figures[kind]["ratio"] < LIMIT, f"streams {kind}: {figures[kind]['ratio']} times the longest gap"


if __name__ == "__main__":
    main()
