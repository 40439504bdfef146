"""Compares the ledger with a scripted vendor's own bill, over all APIs, with leaving clients and killed gateways.

    python -m benchmarks.billing [--calls 50000] [--at-once 64] [--kills 10] [--result FILE]

A real gateway process sends calls of every endpoint to a vendor in every API (`vendor.py`). A share of the clients
leaves, some calls are hedged, and the gateway is killed by SIGKILL and started again. Then, for each vendor: the tokens
and units that it bills, those of the ledger (receipts and unbilled work), and the error. These things must hold: each
receipt that the ledger calls exact equals the vendor's line, no request that the vendor bills is 0 in the ledger, and
the error is 0 for vendors with records and below `ESTIMATE_BOUND` for the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.billing.clients import a_request, send
from benchmarks.billing.vendor import VENDORS
from gateway.billing.ledger.chain import chains, segments
from gateway.billing.ledger.compaction import compacted_lines
from gateway.billing.ledger.rows import complete_receipt
from gateway.core.api_keys import hash_key

KEY = "wp-bench-0123456789abcdef0123456789abcdef"
READY_SECONDS = 600.0  # on a busy machine
QUIET_SECONDS = 120.0  # for crash recovery, which looks up records for 20 seconds
PROVIDERS = {"openai": "openai", "reads": "openai", "vllm": "vllm", "recorded": "warmpath", "anthropic": "anthropic",
             "gemini": "gemini", "ollama": "ollama", "media": "openai", "late": "openai",
             "late_reads": "openai", "spare": "openai"}  # fmt: skip
# Models with two deployments: the first one is often late, so that calls are hedged at the second one.
HEDGED = {"late": ["late", "spare"], "late_reads": ["late_reads", "spare"]}
PRICE = {"input": 1, "output": 2, "image": "0.04", "search": "0.001", "second": "0.0001"}
ESTIMATE_BOUND = 0.02  # of the whole bill of a vendor whose counts are partly estimated


def policy(port: int) -> dict[str, Any]:
    """One deployment and one model for each vendor."""
    deployments: list[dict[str, Any]] = []
    for name, provider in PROVIDERS.items():
        path = {"anthropic": "/v1", "gemini": "/v1beta", "ollama": ""}.get(name, "/v1")
        url = f"http://127.0.0.1:{port}/{name}{path}"
        each: dict[str, Any] = {
            "name": name,
            "provider": provider,
            "base_url": url,
            "model": "m",
            "max_concurrency": 500,
        }
        if VENDORS[name].reads_on:
            each["on_disconnect"] = {"bill": "read_to_end", "max_cost": 100}
        deployments.append(each)
    return {
        "deployments": deployments,
        "models": [
            {
                "name": name,
                "deployments": HEDGED.get(name, [name]),
                "price": PRICE,
            }
            for name in PROVIDERS
            if name != "spare"
        ],
        "classes": {"realtime": {"hedge": {"after": "200ms", "budget": 1.0}}},
        "tenants": [
            {
                "name": "bench",
                "keys": [{"id": "bench", "hash": hash_key(KEY, "")}],
                "limits": {"budget": {"amount": 1_000_000, "per": "total"}},
            }
        ],
    }


class GatewayProcess:
    """The gateway, which is killed and started again in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def start(self) -> None:
        """Start the gateway, and wait until it is ready."""
        settings = {
            "POLICY": self._folder / "policy.yaml", "DATA_DIR": self._folder / "data", "PORT": self.port,
            "REPLICA": "gw", "STORAGE": f"sqlite:///{self._folder}/state.db",
        }  # fmt: skip
        env = {**os.environ, **{f"WARMPATH_{name}": str(value) for name, value in settings.items()}}
        log = self._folder / "log"
        before = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            command = [sys.executable, "-m", "gateway", "serve"]
            self._process = subprocess.Popen(command, env=env, stdout=output, stderr=output)
        until = time.monotonic() + READY_SECONDS
        while (found := log.read_bytes()[before:]).find(b"warmpath ready on") < 0:
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(found.decode())
            time.sleep(0.02)
        self.port = int(found.partition(b"warmpath ready on ")[2].split()[0].rpartition(b":")[2])

    def kill(self) -> None:
        """Kill the gateway as a crash does. Does nothing if it does not run."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        """Stop the gateway in order."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait()


async def drive(gateway: GatewayProcess, calls: int, at_once: int, kills: int, seed: int) -> Counter[str]:
    """Send all calls. Kills and restarts the gateway at equal distances."""
    chance, ends, sent = random.Random(seed), Counter[str](), 0
    models = [name for name in PROVIDERS if name not in ("media", "spare")]
    kill_at = {calls * (number + 1) // (kills + 1) for number in range(kills)}
    is_up, killing = asyncio.Event(), asyncio.Lock()
    is_up.set()

    async def lane() -> None:
        nonlocal sent
        while sent < calls:
            sent += 1
            if sent in kill_at:
                async with killing:  # the next kill may be due before the gateway is ready again
                    is_up.clear()
                    await asyncio.to_thread(gateway.kill)
                    await asyncio.to_thread(gateway.start)
                    is_up.set()
            await is_up.wait()
            ends[await send(gateway.port, KEY, a_request(chance, models))] += 1

    await asyncio.gather(*[lane() for _ in range(at_once)])
    return ends


def ledger_rows(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """The rows of the ledger of some kinds."""
    files = [file for chain in chains(folder / "data" / "ledger") for file in segments(chain)]
    lines = (compacted_lines(file) if file.suffix == ".parquet" else file.read_bytes().splitlines() for file in files)
    rows = [json.loads(line) for part in lines for line in part]
    return [complete_receipt(row) if row["kind"] == "receipt" else row for row in rows if row["kind"] in kinds]


def open_calls(folder: Path) -> set[str]:
    """The calls that have no receipt yet."""
    opened = {row["call_id"] for row in ledger_rows(folder, "opened")}
    return opened - {row["call_id"] for row in ledger_rows(folder, "receipt", "unbilled")}


def compare(bill: list[dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Compare each vendor's bill with the ledger."""
    found: dict[str, dict[str, Any]] = {}
    for vendor in PROVIDERS:
        lines = [line for line in bill if line["vendor"] == vendor]
        own = [row for row in rows if row["deployment"] == vendor]
        counts = {
            "vendor": {"input": sum(line["input"] for line in lines), "output": sum(line["output"] for line in lines)},
            "ledger": {"input": sum(map(_input, own)), "output": sum(row["output"] for row in own)},
        }
        units = {"vendor": Counter[str](), "ledger": Counter[str]()}
        for line in lines:
            units["vendor"].update(line["units"])
        for row in own:
            units["ledger"].update(
                {unit: float(amount) for unit, amount in row.get("units", {}).items() if unit != "request"}
            )
        by_call = {_call_id(line): line for line in lines}
        receipts = [row for row in own if row["kind"] == "receipt"]
        exact = [row for row in receipts if row["exact"] and row["call_id"] in by_call]
        wrong = [row["call_id"] for row in exact if (_input(row), row["output"]) != _counts(by_call[row["call_id"]])]
        in_ledger = Counter[str]()
        for row in own:
            in_ledger[row["call_id"]] += _input(row) + row["output"] + bool(row.get("units"))
        zero = [line for line in lines if line["input"] + line["output"] and not in_ledger[_call_id(line)]]
        whole, billed = sum(counts["vendor"].values()), sum(counts["ledger"].values())
        found[vendor] = {
            **counts, "calls": len(lines), "exact_receipts": len(exact), "wrong_exact_receipts": len(wrong),
            "billed_as_zero": len(zero), "error": (billed - whole) / whole if whole else 0.0,
            "units": {name: dict(counted) for name, counted in units.items()},
        }  # fmt: skip
    return found


def _call_id(line: dict[str, Any]) -> str:
    """The call of a request id, whose further attempts have the form `call-2`."""
    return str(line["request_id"]).partition("-")[0]


def _input(row: dict[str, Any]) -> int:
    return int(row["input_uncached"] + row["cache_read"] + row["cache_write"])


def _counts(line: dict[str, Any]) -> tuple[int, int]:
    return line["input"], line["output"]


def show(compared: dict[str, dict[str, Any]]) -> bool:
    """Print the comparison. Returns whether everything is as it must be."""
    right = True
    columns = ("calls", "exact", "wrong", "zero", "its bill", "ledger", "error")
    print(f"{'vendor':<10}" + "".join(f"{name:>10}" for name in columns))
    for vendor, each in compared.items():
        whole, billed = sum(each["vendor"].values()), sum(each["ledger"].values())
        print(
            f"{vendor:<10}{each['calls']:>10}{each['exact_receipts']:>10}{each['wrong_exact_receipts']:>10}"
            f"{each['billed_as_zero']:>10}{whole:>10}{billed:>10}{each['error']:>10.3%}"
        )
        units_agree = each["units"]["vendor"] == each["units"]["ledger"]
        right = right and units_agree and not each["wrong_exact_receipts"] and not each["billed_as_zero"]
        right = right and abs(each["error"]) <= (0 if VENDORS[vendor].records else ESTIMATE_BOUND)
        if each["units"]["vendor"]:
            print(f"{'':<10} units {each['units']['vendor']}, ledger {each['units']['ledger']}")
    return right


def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) if options.directory is None else options.directory
        folder.mkdir(parents=True, exist_ok=True)
        vendor = subprocess.Popen([sys.executable, "-m", "benchmarks.billing.vendor"], stdout=subprocess.PIPE)
        assert vendor.stdout is not None
        port = int(vendor.stdout.readline().split()[-1])
        (folder / "policy.yaml").write_text(yaml.safe_dump(policy(port)))
        gateway = GatewayProcess(folder)
        try:
            gateway.start()
            ends = asyncio.run(drive(gateway, options.calls, options.at_once, options.kills, options.seed))
            until = time.monotonic() + QUIET_SECONDS
            while open_calls(folder) and time.monotonic() < until:
                time.sleep(1.0)
            gateway.stop()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/bill") as reply:
                bill = json.load(reply)
            (folder / "bill.json").write_text(json.dumps(bill))
        finally:
            gateway.kill()
            vendor.kill()
            vendor.wait()
        compared = compare(bill, ledger_rows(folder, "receipt", "unbilled"))
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        own = resource.getrusage(resource.RUSAGE_SELF)
        cpu_seconds = round(used.ru_utime + used.ru_stime + own.ru_utime + own.ru_stime)
        return {
            "cpu_seconds": cpu_seconds,
            "calls": options.calls,
            "kills": options.kills,
            "ends": dict(ends),
            "vendors": compared,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The ledger beside a scripted vendor's own bill.")
    parser.add_argument("--calls", type=int, default=50_000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="keep the ledger and the vendor's bill here")
    parser.add_argument("--result", type=Path, help="file for the figures, as JSON")
    options = parser.parse_args(arguments)
    result = run(options)
    print(f"{result['calls']} calls, {result['kills']} kills, ends: {result['ends']}")
    right = show(result["vendors"])
    if options.result is not None:
        options.result.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
