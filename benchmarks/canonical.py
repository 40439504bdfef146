"""CPU cost of the canonical form per request on the event loop, beside the rest of the phase.

    python benchmarks/canonical.py [--rounds 15] [--result FILE]

Each request goes through the gateway's canonicaliser, alternately at level off and at level safe, in interleaved
rounds. A figure is the minimum of all rounds, in microseconds of the process's CPU time:

    READ    parsing and validating the body, which every request needs
    FORM    finding the parts of the prompt that the canonical form changes, and changing them
    PRINT   the fingerprint
    PHASE   the whole phase at level safe
    OFF     the whole phase without the canonical form
    NOTE    diagnosis of a sampled call, in a thread of its own after the reply
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gateway.diagnosis import DiagnosisJournal, PrefixDiagnosis
from gateway.endpoints import ENDPOINTS
from gateway.policy import Policy
from gateway.prefix.fingerprint import fingerprint
from gateway.prompts.canonicaliser import Canonicaliser
from gateway.prompts.reader import read_fields
from gateway.prompts.transforms import VERSION, SharedDecisions, TransformPipeline, TransformPlan
from gateway.types import Attempt, PhaseTimings, Principal, Trace, Usage

CHAT = ENDPOINTS[0]
TRACE = Trace(trace_id=1, parent_span_id=0, sampled=False)
SAFE = TransformPlan(VERSION, "safe")
PROMPT_BYTES = 128_000 * 4
COMPACT: dict[str, Any] = {"separators": (",", ":"), "ensure_ascii": False}
BILLING = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=36ee5;"
WORDS = 'The "prefix cache" keeps keys; a longer prompt hits.\n'


def policy(level: str) -> Policy:
    return Policy.model_validate(
        {
            "deployments": [{"name": "a", "base_url": "http://a.invalid/v1", "model": "m"}],
            "models": [{"name": "m", "deployments": ["a"]}],
            "tenants": [{"name": "t"}],
            "canonicalise": {"level": level},
            "diagnosis": {"sample": 1.0},
        }
    )


def tools(count: int) -> list[Any]:
    schema = {"type": "object", "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}}}
    return [
        {"type": "function", "function": {"name": f"tool_{i}", "description": WORDS * 12, "parameters": schema}}
        for i in range(count)
    ]


def conversation(size_bytes: int, *, parts: bool = False) -> list[Any]:
    """200 messages with a total length of `size_bytes`."""
    text = (WORDS * (size_bytes // 200 // len(WORDS) + 1))[: size_bytes // 200]
    content: Any = [{"type": "text", "text": text}] if parts else text
    system = {"role": "system", "content": text}
    return [system, *({"role": "user" if i % 2 == 0 else "assistant", "content": content} for i in range(199))]


def requests() -> dict[str, bytes]:
    hello = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    large = {"model": "m", "messages": conversation(PROMPT_BYTES)}
    agent = {"model": "m", "tools": tools(30), "messages": conversation(PROMPT_BYTES)}
    billed = {**agent, "messages": [dict(m) for m in agent["messages"]]}
    billed["messages"][0]["content"] = f"{BILLING}\n{WORDS}"
    return {
        "hello": json.dumps(hello, **COMPACT).encode(),
        "hello, with spaces": json.dumps(hello).encode(),
        "hello, with 30 tools": json.dumps({**hello, "tools": tools(30)}, **COMPACT).encode(),
        "128k tokens": json.dumps(large, **COMPACT).encode(),
        "128k tokens, 30 tools": json.dumps(agent, **COMPACT).encode(),
        "128k tokens, 30 tools, with spaces": json.dumps(agent).encode(),
        "128k tokens, 30 tools, noise": json.dumps(billed, **COMPACT).encode(),
        "128k tokens in parts": json.dumps(
            {"model": "m", "messages": conversation(PROMPT_BYTES, parts=True)}, **COMPACT
        ).encode(),
    }


def micros(work: Callable[[], object], repeat: int) -> float:
    began = time.process_time_ns()
    for _ in range(repeat):
        work()
    return (time.process_time_ns() - began) / repeat / 1000


def measured(body: bytes, watcher: PrefixDiagnosis, rounds: int) -> dict[str, float]:
    fields = read_fields(body)
    common = CHAT.read(fields, body)
    pipeline = TransformPipeline(SharedDecisions())
    policies = {level: policy(level) for level in ("off", "safe")}
    canonicalisers = {level: Canonicaliser(b"secret") for level in policies}

    def phase(level: str) -> Any:
        return canonicalisers[level].canonicalise(
            CHAT, body, {}, call_id=f"c{time.monotonic_ns()}", principal=Principal(policies[level].tenants[0], "k"),
            policy=policies[level], now=0.0, trace=TRACE,
        )  # fmt: skip

    call, timings = phase("safe"), PhaseTimings()
    timings.end()
    attempt = Attempt("a", "ok", 1, 2, 1)
    usage = Usage(input_uncached=100, exact=True)
    pieces = [piece for piece in common.pieces if isinstance(piece, bytes)]

    def note() -> None:
        watcher.note(call, {}, usage, timings, "a", [attempt])
        watcher.flush()

    works: dict[str, Callable[[], object]] = {
        "read": lambda: CHAT.read(read_fields(body), body),
        "form": lambda: pipeline.canonical_body(fields, common.messages, SAFE, "salt", plain=common.plain),
        "print": lambda: fingerprint(pieces, 1),
        "phase": lambda: phase("safe"),
        "off": lambda: phase("off"),
        "note": note,
    }
    repeat = 2000 if len(body) < 1000 else 500 if len(body) < 50_000 else 10
    minima = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            minima[name] = min(minima[name], micros(work, repeat))
    return {name: round(value, 2) for name, value in minima.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--result", type=Path, help="write the figures to this file, as JSON")
    options = parser.parse_args()
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    print(machine)
    columns = ("read", "form", "print", "phase", "off", "note")
    print(f"{'':36}{'bytes':>8}" + "".join(f"{name.upper():>9}" for name in columns) + "   us")
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, body in requests().items():
            watcher = PrefixDiagnosis(DiagnosisJournal(Path(folder), "r"))
            row = rows[name] = {"bytes": len(body), **measured(body, watcher, options.rounds)}
            watcher.close()
            print(f"{name:36}{len(body):8}" + "".join(f"{row[column]:9.1f}" for column in columns))
    if options.result:
        found = {"machine": machine, "date": datetime.now(UTC).date().isoformat(), "unit": "us", "rows": rows}
        options.result.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
