"""What metering costs: CPU per chunk watched, per receipt made and written, and the time until it is durable.

    python benchmarks/ledger.py [--receipts 20000] [--rate 2000] [--directory DIR]

The gateway's own share of the machine is what counts, so times are CPU times of the whole process, the thread that
calls fsync included. At `--rate` receipts a second each one waits for its fsync, as settling does; the latency shown
is from `append` to `durable`, off the client's path.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gateway.ledger import Ledger, verify
from gateway.ledger.reader import summarise
from gateway.metering import Meter, bill_of, make_receipt
from gateway.policy import Policy
from gateway.types import Attempt, Call, Marks, Operation, Outcome, Principal, Receipt, Trace, Usage

WATCHED_CHUNKS = 200_000
POLICY = Policy.model_validate(
    {
        "deployments": [
            {"name": "a", "base_url": "http://a/v1", "model": "m",
             "price": {"input": "0.10", "cached_input": "0.01", "output": "0.40"}},
        ],
        "models": [{"name": "m", "deployments": ["a"]}],
        "tenants": [{"name": "acme"}],
    }
)  # fmt: skip
CALL = Call(
    id="req_0123456789abcdef",
    operation=Operation.CHAT,
    principal=Principal(POLICY.tenants[0], "key_1"),
    policy=POLICY,
    asked_model="m",
    model=POLICY.models[0],
    class_name="realtime",
    latency_class=POLICY.classes["realtime"],
    stream=True,
    include_usage=False,
    max_output_tokens=None,
    deterministic=False,
    fields={},
    fingerprint=(),
    prompt_tokens_estimate=100,
    cache_salt="",
    service_tier=None,
    end_user=None,
    canonical_steps=(),
    class_rule=None,
    deadline=0.0,
    trace=Trace(trace_id=1 << 100, parent_span_id=0, sampled=False),
)
USAGE = Usage(input_uncached=36, cache_read=64, output=3, exact=True)
CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1790000000,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)


def a_receipt() -> Receipt:
    marks = Marks()
    marks.first_chunk_ns = marks.ended_ns = time.time_ns()
    attempt = Attempt("a", "ok", marks.started_ns, marks.ended_ns, span_id=1, status=200)
    deployment = POLICY.deployments[0]
    bill = bill_of(CALL, USAGE, deployment, arrived_ns=marks.started_ns)
    return make_receipt(
        CALL, USAGE, outcome=Outcome.COMPLETE, marks=marks, bill=bill, attempts=[attempt], deployment=deployment
    )


def cpu_us(work: Callable[[], object], times: int) -> float:
    started = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - started) / times * 1e6


async def write_at_rate(ledger: Ledger, receipts: int, per_second: int) -> tuple[float, list[float]]:
    """CPU microseconds per receipt beyond what pacing the loop costs, and seconds until each was durable."""
    latencies: list[float] = []

    async def settle() -> None:
        appended = time.perf_counter()
        ledger.append(a_receipt())
        await ledger.durable()
        latencies.append(time.perf_counter() - appended)

    async def paced(work: Callable[[], object]) -> float:
        cpu, started = time.process_time(), time.perf_counter()
        for number in range(receipts):
            work()
            await asyncio.sleep(max(0.0, started + (number + 1) / per_second - time.perf_counter()))
        return (time.process_time() - cpu) / receipts * 1e6

    async with asyncio.TaskGroup() as group:
        pacing = await paced(lambda: None)
        settling = await paced(lambda: group.create_task(settle()))
    return settling - pacing, latencies


async def measure(directory: Path, receipts: int, per_second: int) -> None:
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {directory}")
    meter = Meter(CALL)
    print(f"watch a chunk of {len(CHUNK)} bytes   {cpu_us(lambda: meter.watch(CHUNK), WATCHED_CHUNKS):8.2f} us CPU")
    print(f"make a receipt               {cpu_us(a_receipt, receipts):8.2f} us CPU")
    async with Ledger(directory, "benchmark") as ledger:
        receipt = a_receipt()
        print(f"append it                    {cpu_us(lambda: ledger.append(receipt), receipts):8.2f} us CPU")
        await ledger.durable()
        cpu, latencies = await write_at_rate(ledger, receipts, per_second)
    print(f"all of it, {per_second} a second    {cpu:8.2f} us CPU")
    quantiles = statistics.quantiles(latencies, n=100)
    print(f"until durable                {quantiles[49] * 1e3:8.2f} ms p50, {quantiles[98] * 1e3:.2f} ms p99")
    assert verify(directory).broken is None
    rows = verify(directory).rows
    print(f"verify, a row of {rows}       {cpu_us(lambda: verify(directory), 1) / rows:8.2f} us CPU")
    print(f"summarise, a row             {cpu_us(lambda: summarise(directory, by=['day']), 1) / rows:8.2f} us CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--receipts", type=int, default=20_000)
    parser.add_argument("--rate", type=int, default=2_000)
    parser.add_argument("--directory", type=Path, help="where to write; left out: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        asyncio.run(measure(Path(folder), arguments.receipts, arguments.rate))


if __name__ == "__main__":
    main()
