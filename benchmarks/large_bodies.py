"""How long one large request body delays all other requests.

    python -m benchmarks.large_bodies [--runs 7] [--result FILE]

A probe sends GET /health without pause on a connection of its own. Its longest wait while a body of 12 MB is received,
parsed, fingerprinted and sent to a deployment is the time for which the event loop did nothing else, and a bit more.
Other load on the machine only adds to it, so the smallest of several runs is the best estimate. The shapes are chosen
to be expensive: text, and the most small values that a body may have, or more than that.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from gateway.prompts.large_bodies import MAX_STRINGS, MAX_VALUES
from tests.e2e.faults.upstreams import Request, listening
from tests.e2e.processes import Running, deployment, gateway, key, simple_policy

BYTES = 12_000_000
LIMIT_MS = 50.0
SETTLE_SECONDS = 0.2

START = b'{"model":"m","messages":[{"role":"user","content":"hi"}]'
TEXT = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}'
MESSAGE = b'{"role":"user","content":"hi"}'
FILLED = b'{"role":"user","content":"' + b"word " * 500 + b'"}'
TOOL = (
    b'{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"a":{"type":"string"}}}}}'
)


def repeated(start: bytes, unit: bytes, end: bytes, count: int | None = None) -> bytes:
    """A list of equal items: `count`, or as many as fit into 12 MB."""
    items = count or (BYTES - len(start) - len(end)) // (len(unit) + 1)
    return start + b",".join([unit] * items) + end


def keys(count: int) -> bytes:
    return START + b"".join(b',"field%d":%d' % (number, number) for number in range(count)) + b"}"


def properties(count: int) -> bytes:
    names = b",".join(b'"p%d":{"type":"string"}' % number for number in range(count))
    schema = b'{"name":"s","schema":{"type":"object","properties":{%b}}}' % names
    return START + b',"response_format":{"type":"json_schema","json_schema":%b}}' % schema


def shapes() -> dict[str, tuple[str, bytes]]:
    """The path and body of each case."""
    chat = "chat/completions"
    in_chat, many = b'{"model":"m","messages":[', MAX_STRINGS // 4 - 9
    ids = b'{"model":"m","prompt":['
    in_messages = b'{"model":"m","max_tokens":5,"messages":['
    plain = b"lorem ipsum dolor sit amet, " * (BYTES // 28)
    return {
        "text": (chat, TEXT % plain),
        "text with escapes": (chat, TEXT % (b'say \\"hi\\"\\n' * (BYTES // 12))),
        "text that is not ASCII": (chat, TEXT % ("日本語テキスト".encode() * (BYTES // 21))),
        "4,700 messages": (chat, repeated(in_chat, FILLED, b"]}")),
        "as many messages as allowed": (chat, repeated(in_chat, MESSAGE, b"]}", many)),
        "as many tools as allowed": (chat, repeated(START + b',"tools":[', TOOL, b"]}", MAX_STRINGS // 14 - 9)),
        "100,000 fields": (chat, keys(MAX_STRINGS - 9)),
        "as many properties as allowed": (chat, properties(MAX_STRINGS // 3 - 9)),
        "as many token ids as allowed": ("completions", repeated(ids, b"1234567", b"]}", MAX_VALUES - 9)),
        "a million fields": (chat, keys(1_000_000)),
        "400,000 messages": (chat, repeated(in_chat, MESSAGE, b"]}")),
        "6 million token ids": ("completions", repeated(ids, b"1", b"]}")),
        "Messages: text": ("messages", b'{"max_tokens":5,' + (TEXT % plain)[1:]),
        "Messages: as many as allowed": ("messages", repeated(in_messages, MESSAGE, b"]}", many)),
        "Responses: text": ("responses", b'{"model":"m","input":"%b"}' % plain),
        "Responses: as many as allowed": ("responses", repeated(b'{"model":"m","input":[', MESSAGE, b"]}", many)),
    }  # fmt: skip


class Probe:
    """Asks for /health without pause. `longest` is the longest wait since it was set to 0, in seconds."""

    def __init__(self, server: Running) -> None:
        self.longest = 0.0
        self._address = urlsplit(server.url)
        self._stopped = False

    def run(self) -> None:
        client = http.client.HTTPConnection(self._address.hostname or "", self._address.port)
        while not self._stopped:
            began = time.perf_counter()
            client.request("GET", "/health")
            client.getresponse().read()
            self.longest = max(self.longest, time.perf_counter() - began)
        client.close()

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self.run)
        thread.start()
        yield
        self._stopped = True
        thread.join()


def measure(probe: Probe, server: Running, path: str, body: bytes) -> tuple[float, int]:
    """Send one body. Returns the longest wait of the probe in milliseconds, and the reply's status."""
    probe.longest = 0.0
    address = urlsplit(server.url)
    client = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
    client.request("POST", f"/v1/{path}", body, {"authorization": f"Bearer {key('dev')}"})
    reply = client.getresponse()
    reply.read()
    client.close()
    time.sleep(SETTLE_SECONDS)  # work after the reply counts, too
    return probe.longest * 1000, reply.status


async def answer(request: Request) -> None:
    await request.whole(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, listening({"server": answer}) as upstreams:
        server = deployment("d", f"http://127.0.0.1:{upstreams.ports['server']}", provider="openai")
        policy = simple_policy("", deployments=[server], models=[{"name": "m", "deployments": ["d"]}])
        with gateway(Path(folder), policy) as front:
            probe = Probe(front)
            with probe.running():
                time.sleep(1)
                for name, (path, body) in shapes().items():
                    waits, statuses = zip(
                        *(measure(probe, front, path, body) for _ in range(options.runs)), strict=True
                    )
                    figures[name] = {"mb": len(body) / 1e6, "status": statuses[0], "min_ms": min(waits)}
                    figures[name]["median_ms"] = statistics.median(waits)
                    print(
                        f"{name:30} {len(body) / 1e6:5.1f} MB  {statuses[0]}  "
                        f"longest wait {min(waits):6.1f} ms, median {statistics.median(waits):6.1f} ms",
                        flush=True,
                    )
    worst = max(figure["min_ms"] for figure in figures.values())
    print(f"worst {worst:.1f} ms; the limit is {LIMIT_MS:g} ms")
    if options.result is not None:
        when = datetime.now(UTC).isoformat(timespec="seconds")
        machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"
        known = {"when": when, "machine": machine, "runs": options.runs, "worst_ms": worst, "figures": figures}
        options.result.write_text(json.dumps(known, indent=1) + "\n")
    raise SystemExit(worst > LIMIT_MS)


if __name__ == "__main__":
    main()
