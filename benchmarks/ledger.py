"""CPU cost of metering per chunk, per opened call and per receipt, and the time until a receipt is durable and settled.

    python benchmarks/ledger.py [--receipts 20000] [--rate 2000] [--directory DIR] [--result FILE]

Times are CPU times of the whole process, including the thread that calls fsync, on the gateway's event loop and with
its garbage collection thresholds. At `--rate` calls per second, each call is opened, gets its receipt, and is settled
by the gateway's own `Settler` when the receipt is durable. The latency is from the receipt to the settlement, which no
client waits for.

Paced calls alternate, in rounds, with the same pacing around an empty function, whose cost is subtracted. The median
round is shown. Paced calls cost more than consecutive ones: the CPU was idle before each, and its caches hold little of
the program. `making the rows alone` is the part without writing, which is pure computation. The line above it has the
same computation without pacing.

Each row is one `write`. To show that the writes are not the main cost, the two writes of a call are also measured
alone, beside copying the same bytes into mapped memory, which is the minimum for data that survives the process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import mmap
import os
import platform
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import uvloop

from gateway.billing.ledger import Ledger, verify
from gateway.billing.ledger.chain import GENESIS, encode_row
from gateway.billing.ledger.reader import summarise
from gateway.billing.metering import Meter
from gateway.billing.open_calls import make_open_call
from gateway.billing.receipts import bill_of, make_receipt
from gateway.billing.settler import Settler
from gateway.deployments.fleet import Fleet
from gateway.limits import LIMITS
from gateway.limits.limiter import Limiter, Reservation
from gateway.policy import Policy
from gateway.providers.offline import OfflineProvider
from gateway.server.listener import GC_THRESHOLDS
from gateway.storage.base import Charge
from gateway.storage.memory import MemoryStorage
from gateway.types import Attempt, Call, Operation, Outcome, PhaseTimings, Principal, Receipt, Trace, Usage

WATCHED_CHUNKS = 200_000
ROUND = 500  # paced calls per round
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
FLEET = Fleet(lambda deployment: OfflineProvider())
FLEET.apply(POLICY)
(DEPLOYMENT,) = FLEET
TIMINGS = PhaseTimings()
CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1790000000,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)
COUNTED_CHUNK = CHUNK[:-3] + b',"usage":{"prompt_tokens":100,"total_tokens":109,"completion_tokens":9}}\n\n'


def sample_receipt() -> Receipt:
    timings = PhaseTimings()
    timings.first_chunk_ns = timings.ended_ns = time.time_ns()
    attempt = Attempt("a", "ok", timings.started_ns, timings.ended_ns, span_id=1, status=200)
    deployment = POLICY.deployments[0]
    bill = bill_of(CALL, USAGE, deployment, arrived_ns=timings.started_ns)
    return make_receipt(
        CALL, USAGE, outcome=Outcome.COMPLETE, timings=timings, bill=bill, attempts=[attempt], deployment=deployment
    )


def cpu_us(work: Callable[[], object], times: int) -> float:
    started = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - started) / times * 1e6


def one_call(ledger: Ledger) -> None:
    ledger.open_call(make_open_call(CALL, TIMINGS, DEPLOYMENT, 1))
    ledger.append(sample_receipt())


def make_rows() -> None:
    make_open_call(CALL, TIMINGS, DEPLOYMENT, 1)
    sample_receipt()


def writing_alone(directory: Path, times: int) -> tuple[float, float]:
    """CPU microseconds to write the bytes of a call's rows to a file, and to copy them into mapped memory."""
    opened, receipt = (
        encode_row(row, GENESIS)[0] for row in (make_open_call(CALL, TIMINGS, DEPLOYMENT, 1), sample_receipt())
    )
    with (directory / "bytes").open("wb+", buffering=0) as file:

        def write() -> None:
            os.write(file.fileno(), opened)
            os.write(file.fileno(), receipt)

        written, end = cpu_us(write, times), len(opened) + len(receipt)
        with mmap.mmap(file.fileno(), end) as mapped:

            def copy() -> None:
                mapped[: len(opened)] = opened
                mapped[len(opened) : end] = receipt

            return written, cpu_us(copy, times)


class PacedCosts(NamedTuple):
    """CPU microseconds per call without the cost of pacing, and seconds from receipt to settlement."""

    pacing: float
    making: float
    receipt: float
    call: float
    latencies: list[float]


class TimingLimiter(Limiter):
    """Records how long after its receipt each reservation is settled, in the order of their receipts."""

    def __init__(self) -> None:
        super().__init__(MemoryStorage(), LIMITS)
        self.appended = deque[float]()
        self.latencies: list[float] = []

    async def end(self, name: str, actual: Sequence[int], charges: Sequence[Charge]) -> None:
        self.latencies.append(time.perf_counter() - self.appended.popleft())


async def at_rate(ledger: Ledger, receipts: int, per_second: int) -> PacedCosts:
    limiter = TimingLimiter()
    settler = Settler(limiter, ledger)

    def settle_one() -> None:
        one_call(ledger)
        limiter.appended.append(time.perf_counter())
        settler.settle(Reservation(limiter, "acme/req", (), {}), USAGE, 0, "acme")

    async def paced(work: Callable[[], object]) -> float:
        cpu, started = time.process_time(), time.perf_counter()
        for number in range(ROUND):
            work()
            await asyncio.sleep(max(0.0, started + (number + 1) / per_second - time.perf_counter()))
        return (time.process_time() - cpu) / ROUND * 1e6

    works: list[Callable[[], object]] = [lambda: None, make_rows, lambda: ledger.append(sample_receipt()), settle_one]
    rounds = [[await paced(work) for work in works] for _ in range(max(1, receipts // ROUND))]
    await settler.stop()
    pacing, making, receipt, call = (statistics.median(costs) for costs in zip(*rounds, strict=True))
    return PacedCosts(pacing, making - pacing, receipt - pacing, call - pacing, limiter.latencies)


async def measure(directory: Path, receipts: int, per_second: int) -> list[str]:
    lines: list[str] = []

    def report(what: str, value: float, unit: str, more: str = "") -> None:
        lines.append(f"{what:40}{value:8.2f} {unit}{more}")
        print(lines[-1], flush=True)

    meter = Meter(CALL)
    report(f"watch a chunk of {len(CHUNK)} bytes", cpu_us(lambda: meter.watch(CHUNK), WATCHED_CHUNKS), "us CPU")
    meter.strip_every_usage = True  # as if the policy had set `continuous_usage`
    meter.watch(CHUNK)
    report("and remove its counts", cpu_us(lambda: meter.watch(COUNTED_CHUNK), WATCHED_CHUNKS), "us CPU")
    report("make a receipt", cpu_us(sample_receipt, receipts), "us CPU")
    report("make both rows of a call", cpu_us(make_rows, receipts), "us CPU")
    written, copied = writing_alone(directory, receipts)
    report("write their bytes, alone", written, "us CPU", f"; copy them into mapped memory: {copied:.2f}")
    async with Ledger(directory, "benchmark") as ledger:
        receipt = sample_receipt()
        report("append it", cpu_us(lambda: ledger.append(receipt), receipts), "us CPU")
        report("open, make and append, unpaced", cpu_us(lambda: one_call(ledger), receipts), "us CPU a call")
        await ledger.durable()
        paced = await at_rate(ledger, receipts, per_second)
    report(f"{per_second} a second: pacing alone", paced.pacing, "us CPU")
    report("more, with making the rows alone", paced.making, "us CPU a call")
    report("more, with a receipt made and kept", paced.receipt, "us CPU a receipt")
    report("more, with open, receipt and settle", paced.call, "us CPU a call")
    quantiles = statistics.quantiles(paced.latencies, n=100)
    report("until settled", quantiles[49] * 1e3, "ms p50", f", {quantiles[98] * 1e3:.2f} ms p99")
    verification = verify(directory)
    assert not (verification.broken or verification.unreadable)
    rows = verification.rows
    report(f"verify, a row of {rows}", cpu_us(lambda: verify(directory), 1) / rows, "us CPU")
    report("summarise, a row", cpu_us(lambda: summarise(directory, by=["day"]), 1) / rows, "us CPU")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--receipts", type=int, default=20_000)
    parser.add_argument("--rate", type=int, default=2_000)
    parser.add_argument("--directory", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--result", type=Path, help="a file for the printed result")
    arguments = parser.parse_args()
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    print(machine)
    gc.set_threshold(*GC_THRESHOLDS)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        lines = uvloop.run(measure(Path(folder), arguments.receipts, arguments.rate))
    if arguments.result:
        title = f"benchmarks/ledger.py, {datetime.now(UTC):%Y-%m-%d}: {machine}, {arguments.receipts} receipts"
        arguments.result.write_text("\n".join([title, "", *lines, ""]))


if __name__ == "__main__":
    main()
