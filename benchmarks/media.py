"""How long images, recordings and files hold the event loop: the canonicalise phase of requests that contain them.

    python benchmarks/media.py [--rounds 9] [--result FILE]

A figure is the minimum of all rounds, in milliseconds of the thread's CPU time: READ is reading the body without
looking at its content parts, PHASE is the whole phase. The hostile requests are built to cost as much as possible.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import platform
import random
import struct
import time
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from gateway.endpoints import ENDPOINTS
from gateway.policy import Policy
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.prompts.media.encoded import ITEMS_MAX
from gateway.prompts.reader import read_fields
from gateway.types import Principal, Trace

CHAT = ENDPOINTS[0]
POLICY = Policy.model_validate(
    {
        "deployments": [{"name": "d", "base_url": "http://d.invalid/v1", "model": "qwen2.5-vl"}],
        "models": [{"name": "m", "deployments": ["d"]}],
        "tenants": [{"name": "t"}],
    }
)
PRINCIPAL = Principal(POLICY.tenants[0], "k")
TRACE = Trace(trace_id=1, parent_span_id=0, sampled=False)


def png(bytes_behind: int) -> bytes:
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBB", 13, b"IHDR", 4000, 3000, 8, 2, 0, 0, 0)
    return header + random.Random(1).randbytes(bytes_behind)


def jpeg(segments: int, segment_bytes: int, bytes_behind: int) -> bytes:
    segment = b"\xff\xe2" + struct.pack(">H", segment_bytes + 2) + bytes(segment_bytes)
    frame = b"\xff\xc0\x00\x11\x08" + struct.pack(">HH", 3000, 4000)
    return b"\xff\xd8" + segment * segments + frame + random.Random(2).randbytes(bytes_behind)


def image(content: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(content).decode()}"}}


def pdf(content: bytes) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{base64.b64encode(content).decode()}"}}


def requests() -> dict[str, list[dict[str, Any]]]:
    """The content parts of each request, by a name that is printed."""
    node = b"1 0 obj << /Type /Pages /Count 12 >> endobj\n"
    bomb = b"%PDF-1.5\n" + (b"/ObjStm >> stream\n" + zlib.compress(b"/Type /Pages /Count 9 " * 20_000)) * 30
    return {
        "one image of 12 MB": [image(png(9_000_000))],
        "one image of 300 kB": [image(png(225_000))],
        "forty photos of 300 kB": [image(jpeg(20, 1_000, 200_000))] * 40,
        "a PDF of 4 MB": [pdf(b"%PDF-1.4\n" + random.Random(3).randbytes(3_000_000) + node)],
        "a thousand links": [{"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}] * 1_000,
        "hostile: as many links as allowed": [{"type": "image_url", "image_url": {"url": "x"}}] * ITEMS_MAX,
        "hostile: JPEGs of many segments": [image(jpeg(99, 0, 0))] * ITEMS_MAX,
        "hostile: PDFs of page trees": [pdf(b"%PDF-1.4" + b"/Type /Pages /Count 1 " * 6_000)] * 60,
        "hostile: PDFs that inflate": [pdf(bomb)] * 60,
    }


def cpu_ms(work: Callable[[], object], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        started = time.thread_time_ns()
        work()
        best = min(best, time.thread_time_ns() - started)
    return best / 1e6


def measure(parts: list[dict[str, Any]], rounds: int) -> dict[str, float]:
    body = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": parts}]})
    canonicaliser = Canonicaliser(b"secret")

    def phase() -> object:
        return canonicaliser.canonicalise(
            CHAT, body, {}, call_id="req_1", principal=PRINCIPAL, policy=POLICY, now=0.0, trace=TRACE
        )

    return {
        "megabytes": round(len(body) / 1e6, 2),
        "read_ms": round(cpu_ms(lambda: read_fields(body), rounds), 2),
        "phase_ms": round(cpu_ms(phase, rounds), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--result", type=Path, help="file to write as JSON")
    arguments = parser.parse_args()
    print(f"{'':36}{'MB':>8}{'READ ms':>10}{'PHASE ms':>10}")
    figures = {}
    for name, parts in requests().items():
        figures[name] = measure(parts, arguments.rounds)
        print(f"{name:36}" + "{megabytes:8}{read_ms:10}{phase_ms:10}".format(**figures[name]), flush=True)
    if arguments.result is not None:
        machine = {"date": datetime.now(UTC).isoformat(), "cpus": os.cpu_count(), "python": platform.python_version()}
        arguments.result.write_text(json.dumps({**machine, "rounds": arguments.rounds, "requests": figures}, indent=1))


if __name__ == "__main__":
    main()
