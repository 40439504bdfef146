"""What many stored tenants and keys cost: the start of a gateway, its memory, and admission.

    python -m benchmarks.tenants [--tenants 5000] [--keys 20000] [--result FILE]

A gateway is started on an empty SQLite file and on one with the tenants and keys: seconds until it is ready, its CPU
seconds until then, and its memory. In a process with the gateway's components, one key is authenticated and admitted
many times, alone and after all keys were used: calls of Python functions, CPU microseconds, and memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from gateway.auth.authenticator import Authenticator
from gateway.auth.records import RecordFeed
from gateway.auth.tenant_directory import TENANT, TenantDirectory
from gateway.core.api_keys import hash_key
from gateway.limits import LIMITS
from gateway.limits.limiter import Limiter
from gateway.limits.slices import Slices
from gateway.policy import Policy
from gateway.storage.base import KeyRecord, Storage, StoredRecord
from gateway.storage.sqlite import SqliteStorage
from gateway.types import Call, Operation, Trace, Usage

ROUNDS = 2_000
AT_ONCE = 500  # storage operations
READY_SECONDS = 60.0
PATIENT_SECONDS = 60.0  # for a storage operation; the machine may be busy
SECRET = "0123456789abcdef0123456789abcdef"
LIMITS_OF_TENANT = {"requests": "600000/1m", "tokens": "100M/1m", "budget": {"amount": 1000}}
POLICY: dict[str, Any] = {
    "deployments": [
        {"name": "a", "base_url": "http://127.0.0.1:9/v1", "model": "m", "price": {"input": 1, "output": 2}}
    ],
    "models": [{"name": "m", "deployments": ["a"]}],
    "tenants": [{"name": "organisation"}],
}


def key(number: int) -> str:
    return f"wp-k{number}-{SECRET}"


async def fill(url: str, tenants: int, keys: int) -> None:
    """Store tenants, a tenth of them projects and the others their teams, and keys of all of them in turn."""
    storage = SqliteStorage(url, owner="bench", timeout_seconds=PATIENT_SECONDS)
    await storage.open()
    operations: list[Any] = []
    for number in range(tenants):
        parent = "organisation" if number % 10 == 0 else f"t{number - number % 10}"
        fields = {"name": f"t{number}", "parent": parent, "limits": LIMITS_OF_TENANT}
        operations.append(storage.change_record(StoredRecord(TENANT, f"t{number}", json.dumps(fields))))
    for number in range(keys):
        owner = f"t{number % tenants}"
        operations.append(
            storage.put_key(KeyRecord(f"k{number}", owner, hash_key(key(number), ""), "2026-11-20T00:00:00Z"))
        )
    for start in range(0, len(operations), AT_ONCE):
        await asyncio.gather(*operations[start : start + AT_ONCE])
    await storage.close()


def started(folder: Path, url: str) -> dict[str, float]:
    """Start a gateway. Returns its seconds and CPU seconds until it is ready, and its memory then."""
    folder.mkdir()
    (folder / "policy.yaml").write_text(yaml.safe_dump(POLICY))
    settings = {"POLICY": folder / "policy.yaml", "DATA_DIR": folder / "data", "STORAGE": url, "PORT": 0}
    env = {**os.environ, **{f"WARMPATH_{name}": str(value) for name, value in settings.items()}}
    began = time.monotonic()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "gateway", "serve"], env=env, stdout=log, stderr=log)
    try:
        while not re.search(rb"warmpath ready on", (folder / "log").read_bytes()):
            if process.poll() is not None or time.monotonic() - began > READY_SECONDS:
                raise RuntimeError((folder / "log").read_text())
            time.sleep(0.005)
        seconds = time.monotonic() - began
        time.sleep(1.0)  # so that what follows the start is counted, too
        status = Path(f"/proc/{process.pid}/status").read_text()
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        cpu = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        memory = int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024
        return {"ready_seconds": seconds, "cpu_seconds": cpu, "memory_mib": memory}
    finally:
        process.terminate()
        process.wait()


class Components:
    """The parts of a gateway that authenticate and admit."""

    def __init__(self, storage: Storage) -> None:
        self.policy = Policy.model_validate(POLICY)
        self.feed = RecordFeed(storage)
        self.authenticator = Authenticator(storage, "", TenantDirectory(self.feed))
        self.slices = Slices(storage, "bench")
        self.slices.begin_leasing()
        self.limiter = Limiter(storage, LIMITS, slices=self.slices)

    async def call(self, number: int, name: str) -> None:
        """Authenticate a key, and admit and settle one call of it."""
        headers = {b"authorization": f"Bearer {key(number)}".encode()}
        principal = await self.authenticator.authenticate(headers, self.policy)
        policy = self.policy
        call = Call(
            id=name, operation=Operation.CHAT, principal=principal, policy=policy, asked_model="m",
            model=policy.models[0], class_name="realtime", latency_class=policy.classes["realtime"], stream=False,
            include_usage=False, max_output_tokens=64, deterministic=False, fields={}, fingerprint=(),
            prompt_tokens_estimate=100, cache_salt="", service_tier=None, end_user=None, canonical_steps=(),
            class_rule=None, deadline=0.0, trace=Trace(1, 0, sampled=False),
        )  # fmt: skip
        reservation = await self.limiter.admit(call)
        reservation.bill(Usage(input_uncached=90, output=30), 150_000, name)
        await reservation.settle(Usage(input_uncached=90, output=30), 150_000)


async def cost_of_one(parts: Components, label: str) -> dict[str, float]:
    """The cost of one key's calls, whose record and slices are known."""
    for number in range(50):
        await parts.call(1, f"{label}-warm-{number}")
    calls = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    best, least = float("inf"), float("inf")
    for round_number in range(20):
        began = time.process_time()
        for number in range(ROUNDS // 20):
            await parts.call(1, f"{label}-{round_number}-{number}")
        best = min(best, (time.process_time() - began) / (ROUNDS // 20) * 1e6)
    for number in range(20):
        calls = 0
        sys.setprofile(count)
        await parts.call(1, f"{label}-counted-{number}")
        sys.setprofile(None)
        least = min(least, calls)
    return {"python_calls": least, "cpu_microseconds": best}


async def admission(url: str, keys: int) -> dict[str, dict[str, float]]:
    """The cost of one key's calls, alone and after all keys were used, and the memory of all."""
    storage = SqliteStorage(url, owner="bench", timeout_seconds=PATIENT_SECONDS)
    await storage.open()
    parts = Components(storage)
    await parts.feed.refresh()
    alone = await cost_of_one(parts, "alone")
    before = resident_mib()
    for start in range(0, keys, AT_ONCE):
        some = range(start, min(start + AT_ONCE, keys))
        await asyncio.gather(*[parts.call(number, f"all-{number}") for number in some])
        await parts.slices.report_all()
    after = resident_mib()
    beside = await cost_of_one(parts, "beside")
    await parts.slices.report_all(give_back=True)
    await storage.close()
    return {"alone": alone, f"after {keys} keys were used": {**beside, "more_memory_mib": after - before}}


def resident_mib() -> float:
    return int(re.findall(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


def run(tenants: int, keys: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        urls = {what: f"sqlite:///{folder}/{what}.db" for what in ("empty", "full")}
        began = time.monotonic()
        asyncio.run(fill(urls["full"], tenants, keys))
        filled = time.monotonic() - began
        starts = {what: started(folder / what, url) for what, url in urls.items()}
        return {
            "tenants": tenants, "keys": keys, "fill_seconds": filled, "start": starts,
            "admission": asyncio.run(admission(urls["full"], keys)),
        }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    for part in ("start", "admission"):
        for row, values in result[part].items():
            print(f"{part}, {row}: " + ", ".join(f"{value:.2f} {name}" for name, value in values.items()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What many stored tenants and keys cost a gateway.")
    parser.add_argument("--tenants", type=int, default=5_000)
    parser.add_argument("--keys", type=int, default=20_000)
    parser.add_argument("--result", type=Path, help="file for the figures, as JSON")
    options = parser.parse_args(arguments)
    result = run(options.tenants, options.keys)
    show(result)
    if options.result is not None:
        options.result.write_text(json.dumps(msgspec.to_builtins(result), indent=2) + "\n")


if __name__ == "__main__":
    main()
