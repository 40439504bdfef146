"""How long one large request body holds the event loop, and so delays all other requests.

    python -m benchmarks.large_bodies [--runs 7] [--result FILE]

The gateway runs with a timer in its event loop (`benchmarks.loop_gaps`), which notes the CPU time that the process uses
between two turns. So other load on the machine changes the figures little. The bodies have 12 MB, and shapes that are
chosen to be expensive: text, and the most small values that a body may have, or more than that. They are sent to
deployments whose API is OpenAI's, and to deployments for which they are translated. Each body differs from the others,
so nothing is remembered. Each figure is the longest gap from the body's first bytes to the end of the call.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import statistics
import tempfile
import time
import zlib
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.loop_gaps import FILE, longest_gap_ms
from gateway.prompts.large_bodies import MAX_STRINGS, MAX_VALUES
from tests.e2e.faults.upstreams import Request, listening
from tests.e2e.processes import Gateway, deployment, gateway, key, simple_policy

BYTES = 12_000_000
LIMIT_MS = 30.0
SETTLE_SECONDS = 0.2
TRANSLATED = ("anthropic", "gemini", "ollama")

START = b'{"model":"m","messages":[{"role":"user","content":"hi"}]'
TEXT = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}'
MESSAGE = b'{"role":"user","content":"hi"}'
FILLED = b'{"role":"user","content":"' + b"word " * 500 + b'"}'
WORDS = b'"' + b"word " * 23 + b'"'
PARTS = b'{"role":"user","content":['
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
    small = b'{"type":"text","text":"hi"}'
    plain = b"lorem ipsum dolor sit amet, " * (BYTES // 28)
    return {
        "text": (chat, TEXT % plain),
        "text with escapes": (chat, TEXT % (b'say \\"hi\\"\\n' * (BYTES // 12))),
        "text that is not ASCII": (chat, TEXT % ("日本語テキスト".encode() * (BYTES // 21))),
        "4,700 messages": (chat, repeated(in_chat, FILLED, b"]}")),
        "as many messages as allowed": (chat, repeated(in_chat, MESSAGE, b"]}", many)),
        "as many tools as allowed": (chat, repeated(START + b',"tools":[', TOOL, b"]}", MAX_STRINGS // 14 - 9)),
        "as many parts as allowed": (chat, repeated(in_chat + PARTS, small, b"]}]}", many)),
        "100,000 fields": (chat, keys(MAX_STRINGS - 9)),
        "as many properties as allowed": (chat, properties(MAX_STRINGS // 3 - 9)),
        "as many token ids as allowed": ("completions", repeated(ids, b"1234567", b"]}", MAX_VALUES - 9)),
        "as many inputs as allowed": ("embeddings", repeated(b'{"model":"m","input":[', WORDS, b"]}", 4 * many)),
        "a million fields": (chat, keys(1_000_000)),
        "400,000 messages": (chat, repeated(in_chat, MESSAGE, b"]}")),
        "6 million token ids": ("completions", repeated(ids, b"1", b"]}")),
        "Messages: text": ("messages", b'{"max_tokens":5,' + (TEXT % plain)[1:]),
        "Messages: as many as allowed": ("messages", repeated(in_messages, MESSAGE, b"]}", many)),
        "Responses: text": ("responses", b'{"model":"m","input":"%b"}' % plain),
        "Responses: as many as allowed": ("responses", repeated(b'{"model":"m","input":[', MESSAGE, b"]}", many)),
    }  # fmt: skip


def all_shapes() -> dict[str, tuple[str, bytes]]:
    """Those of `shapes`, and chats for deployments with other APIs."""
    known = shapes()
    chats = ("text", "text with escapes", "text that is not ASCII", "as many messages as allowed")
    return known | {
        f"{model}: {name}": (known[name][0], known[name][1].replace(b'"model":"m"', b'"model":"%b"' % model.encode()))
        for model in TRANSLATED
        for name in chats
    }


def measure(server: Gateway, gaps: Path, path: str, body: bytes, number: int) -> tuple[float, int]:
    """Send one body with a number in its first text. Returns the longest gap in ms, and the reply's status."""
    offset = gaps.stat().st_size
    address = urlsplit(server.url)
    client = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
    headers = {"authorization": f"Bearer {key('dev')}", "idempotency-key": f"{zlib.crc32(body)} {number}"}
    client.request("POST", f"/v1/{path}", body.replace(b'"content":"', b'"content":"%d ' % number, 1), headers)
    reply = client.getresponse()
    reply.read()
    client.close()
    time.sleep(SETTLE_SECONDS)  # work after the reply counts, too
    return longest_gap_ms(gaps, offset), reply.status


async def answer(request: Request) -> None:
    await request.whole(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary, listening({"server": answer}) as upstreams:
        folder, gaps = Path(temporary), Path(temporary) / "gaps"
        gaps.touch()
        url = f"http://127.0.0.1:{upstreams.ports['server']}"
        models = {"m": "openai", **{name: name for name in TRANSLATED}}
        policy = simple_policy(
            "",
            deployments=[deployment(name, url, provider=provider) for name, provider in models.items()],
            models=[{"name": name, "deployments": [name]} for name in models],
            idempotency={"keep": "1h"},
            cache={"when": "always"},
        )
        environment = {FILE: str(gaps)}
        with gateway(folder, policy, environment=environment, module="benchmarks.loop_gaps") as front:
            for name, (path, body) in all_shapes().items():
                runs = [measure(front, gaps, path, body, number) for number in range(options.runs)]
                longest = [gap_ms for gap_ms, _ in runs]
                figures[name] = {
                    "mb": len(body) / 1e6, "status": runs[0][1], "min_ms": min(longest),
                    "median_ms": statistics.median(longest), "max_ms": max(longest),
                }  # fmt: skip
                print(
                    f"{name:36} {len(body) / 1e6:5.1f} MB  {runs[0][1]}  longest gap: "
                    f"median {statistics.median(longest):5.1f} ms, {min(longest):5.1f} to {max(longest):5.1f}",
                    flush=True,
                )
    worst = max(figure["median_ms"] for figure in figures.values())
    print(f"worst median {worst:.1f} ms; the limit is {LIMIT_MS:g} ms")
    if options.result is not None:
        when = datetime.now(UTC).isoformat(timespec="seconds")
        machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"
        known = {"when": when, "machine": machine, "runs": options.runs, "worst_ms": worst, "figures": figures}
        options.result.write_text(json.dumps(known, indent=1) + "\n")
    raise SystemExit(worst > LIMIT_MS)


if __name__ == "__main__":
    main()
