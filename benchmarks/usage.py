"""Time to sum a large ledger: as the JSON lines that the gateway writes, and compacted to Parquet.

    python benchmarks/usage.py [--receipts 10000000] [--directory DIR] [--output FILE] [--lines-only] [--repeat 1]

The ledger's own code writes the receipts, as one chain: forty tenants, two hundred keys, six models, thirty days. Each
sum is then queried as `warmpath usage` does it, with no rows cached in the process. The files may be in the page cache,
as they are for a ledger in use. The sums of both formats must be equal. CPU seconds are measured as well: on a machine
that is busy with other work, half of them is what two quiet cores would take at best. With `--repeat`, each sum is
queried several times, and the least of each kind of seconds counts. Ten million receipts take some 9 GB as lines and a
sixth of that as Parquet, and for a moment both exist at once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import resource
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import msgspec

from gateway.billing.ledger.chain import GENESIS, UNCOMPACTED_SEGMENTS, encode_row, segment_name
from gateway.billing.ledger.compaction import compact
from gateway.billing.ledger.reader import UsageLine, summarise
from gateway.core.ids import new_event_id
from gateway.core.money import atoms_to_text
from gateway.policy import REALTIME
from gateway.types import AttemptRow, Receipt

SEGMENT_BYTES = 32 * 1024 * 1024  # as the gateway's
DAYS = 30
QUERIES: dict[str, list[str]] = {
    "everything": [],
    "by tenant": ["tenant"],
    "by tenant and day": ["tenant", "day"],
    "by key, model, class and day": ["key", "model", "class", "day"],
}
MEASURED_ON_LINES = "by tenant and day"  # the others take as long, since lines are always parsed completely
ATTEMPT = AttemptRow("0" * 16, 0.001234, 1.234567, 64)
TYPICAL = Receipt(
    event_id="", call_id="", tenant="", key_id="", model_asked="", model_served="qwen3-32b", deployment="h200-a",
    started="", finished="", ttft_seconds=0.25, source="engine", input_uncached=0, cache_read=0, output=0,
    price_version="2026-11", price_input="0.10", price_cached_input="0.01", price_output="0.40", cost="",
    currency="USD", attempts=(ATTEMPT,), policy_hash="0123456789abcdef", trace_id="",
)  # fmt: skip


def write(ledger: Path, count: int) -> None:
    """Write a chain as a gateway would have written it in a month."""
    rng = random.Random(1)
    chain = ledger / "benchmark"
    chain.mkdir(parents=True)
    start, step = datetime(2026, 11, 1, tzinfo=UTC), timedelta(days=DAYS) / count
    head, number, size = GENESIS, 1, 0
    segment = (chain / segment_name(number)).open("wb")
    for i in range(count):
        line, head = encode_row(_receipt(rng, start + step * i), head)
        if size + len(line) > SEGMENT_BYTES:
            segment.close()
            number, size = number + 1, 0
            segment = (chain / segment_name(number)).open("wb")
        segment.write(line)
        size += len(line)
    segment.close()


def _receipt(rng: random.Random, finished: datetime) -> Receipt:
    tenant, bits = rng.randrange(40), rng.getrandbits(128)
    computed, cached, output = rng.randrange(2000), 64 * rng.randrange(100), rng.randrange(500)
    text = f"{finished:%Y-%m-%dT%H:%M:%S.%fZ}"
    return msgspec.structs.replace(
        TYPICAL,
        event_id=new_event_id(),
        call_id=f"req_{bits >> 32:024x}",
        tenant=f"tenant-{tenant}",
        key_id=f"key_{tenant}_{bits % 5}",
        model_asked=f"model-{bits % 6}",
        latency_class="batch" if bits % 7 == 0 else REALTIME,
        started=text,
        finished=text,
        ttft_seconds=(bits % 1000) / 1000,
        input_uncached=computed,
        cache_read=cached,
        output=output,
        cost=atoms_to_text((computed * 100 + cached * 10 + output * 400) * 10**6),
        trace_id=f"{bits:032x}",
    )


def measure_queries(ledger: Path, *names: str, repeat: int) -> tuple[dict[str, float], dict[str, list[UsageLine]]]:
    """Return the least seconds of `repeat` runs of each query, and its sums."""
    seconds, sums = dict[str, float](), dict[str, list[UsageLine]]()
    for name in names * repeat:
        cpu = cpu_seconds()
        sums[name], wall = timed(partial(summarise, ledger, by=QUERIES[name]))
        cpu = cpu_seconds() - cpu
        print(f"  {name:34} {wall:7.2f} s   {cpu:7.2f} CPU s   {len(sums[name])} groups", flush=True)
        for key, measured in ((name, wall), (f"{name}, CPU", cpu)):
            seconds[key] = min(measured, seconds.get(key, math.inf))
    return seconds, sums


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    return work(), time.perf_counter() - started


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def size_mib(ledger: Path) -> int:
    return sum(file.stat().st_size for file in ledger.rglob("*") if file.is_file()) >> 20


def measure(ledger: Path, count: int, *, lines_only: bool, repeat: int) -> dict[str, Any]:
    processor = platform.processor() or platform.machine()
    machine = f"{os.cpu_count()} cores, {processor}, Python {platform.python_version()}, DuckDB {duckdb.__version__}"
    print(machine)
    _, writing = timed(lambda: write(ledger, count))
    print(f"{count} receipts, {size_mib(ledger)} MiB, written in {writing:.0f} s\nas lines", flush=True)
    result: dict[str, Any] = {"machine": machine, "receipts": count, "lines_mib": size_mib(ledger)}
    result["lines_seconds"], expected = measure_queries(ledger, MEASURED_ON_LINES, repeat=repeat)
    if lines_only:
        return result
    done, result["compact_seconds"] = timed(lambda: compact(ledger, before=math.inf))
    result["parquet_mib"] = size_mib(ledger)
    print(f"compacted in {result['compact_seconds']:.0f} s: {len(done)} segments, {result['parquet_mib']} MiB")
    print(f"as Parquet (except the newest {UNCOMPACTED_SEGMENTS} segments)")
    result["parquet_seconds"], found = measure_queries(ledger, *QUERIES, repeat=repeat)
    assert found[MEASURED_ON_LINES] == expected[MEASURED_ON_LINES], "the sums differ"
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--receipts", type=int, default=10_000_000)
    parser.add_argument("--directory", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--output", type=Path, help="a file for the result, as JSON")
    parser.add_argument("--lines-only", action="store_true", help="do not convert the lines to Parquet")
    parser.add_argument("--repeat", type=int, default=1, help="how often each sum is queried (default: 1)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        result = measure(Path(folder), arguments.receipts, lines_only=arguments.lines_only, repeat=arguments.repeat)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
