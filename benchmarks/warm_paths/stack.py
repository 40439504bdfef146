"""Runs bundled engines and the gateway in front of them as real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gateway.billing.ledger.chain import chains, segments
from gateway.billing.ledger.rows import complete_receipt
from gateway.core.api_keys import hash_key

ROOT = Path(__file__).parents[2]
DEMO_WEIGHTS = ROOT / "backend" / "demo_model" / "weights"
MODEL = "demo"
CONTEXT_TOKENS = 16_384
TRANSFERS = ("--kv-transfer", "--kv-transfer-peers", "127.0.0.1")  # an engine's options
LOADED_TOKENS_PER_SECOND = 100_000  # of the demo model, over loopback, as measured with benchmarks.simulator.loads
START_SECONDS_MAX = 120.0
STOP_SECONDS_MAX = 30.0


def key_of(tenant: str) -> str:
    return f"wp-{tenant}-0123456789abcdef"


def long_demo_model(folder: Path) -> Path:
    """Copy the demo model with a longer context than it was trained for. Its answers get worse, its costs stay real."""
    model = folder / "model"
    shutil.copytree(DEMO_WEIGHTS, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT_TOKENS}))
    return model


@contextlib.contextmanager
def running(
    command: Sequence[str], folder: Path, ready: str, *, seconds: float = START_SECONDS_MAX, **settings: str
) -> Iterator[str]:
    """Run a process until the end of the block, then end it with SIGTERM.

    Waits for the `ready` pattern on stdout or stderr, and yields its first group, such as the address.
    """
    folder.mkdir(parents=True)
    out, log = folder / "stdout", folder / "stderr"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("WARMPATH_", "OTEL_"))}
    with out.open("wb") as stdout, log.open("wb") as stderr:
        env = clean | {"PYTHONPATH": str(ROOT)} | settings
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env, cwd=folder)
    try:
        end = time.monotonic() + seconds
        while not (found := re.search(ready, out.read_text() + log.read_text())):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{' '.join(command)} did not start:\n{out.read_text()}{log.read_text()}")
            time.sleep(0.05)
        yield found[1]
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_SECONDS_MAX)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextlib.contextmanager
def engine(
    folder: Path, model: Path, num_blocks: int, *options: str, prompt_tokens_details: bool = True
) -> Iterator[dict[str, Any]]:
    """Run a bundled engine. Yields its deployment, as in a policy.

    Without `prompt_tokens_details` it does not report cached tokens. `options` are added to its command.
    """
    command = [sys.executable, "-m", "backend", "--model", str(model), "--served-model-name", MODEL, "--port", "0"]
    command.append("--wait-for-kernels")
    command += ["--num-threads", "1", "--num-blocks", str(num_blocks)]
    events, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
    command += ["--kv-events", events, "--kv-events-replay", replay]
    command += options
    if not prompt_tokens_details:
        command.append("--no-prompt-tokens-details")
    with running(command, folder, r"engine ready on (\S+) model") as url:
        yield {
            "name": folder.name,
            "provider": "warmpath",
            "base_url": f"{url}/v1",
            "model": MODEL,
            "kv_events": events,
            "kv_events_replay": replay,
            "metrics": True,
        }


@contextlib.contextmanager
def gateway(
    folder: Path, deployments: Sequence[Mapping[str, Any]], tenants: Sequence[str], **policy: Any
) -> Iterator[str]:
    """Run a gateway with these deployments and tenants. Yields its URL."""
    folder.mkdir(parents=True)
    file = folder / "policy.yaml"
    content = {
        "deployments": [dict(deployment) for deployment in deployments],
        "models": [{"name": MODEL, "deployments": [deployment["name"] for deployment in deployments]}],
        "cache": {"scope": "off"},
        "classes": {
            "realtime": {"ttft": "5m", "inter_token": "5m", "total": "10m"}
        },  # long, so that a busy machine causes no timeouts
        "tenants": [{"name": t, "keys": [{"id": t, "hash": hash_key(key_of(t), "")}]} for t in tenants],
        **policy,
    }
    file.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "gateway", "serve", "--policy", str(file), "--port", "0"]
    settings: dict[str, Any] = {
        "WARMPATH_DATA_DIR": str(folder / "data"),
        "WARMPATH_STORAGE": "memory://",
        "WARMPATH_REPLICA": "gw",
    }
    with running(command, folder / "process", r"warmpath ready on (\S+) policy", **settings) as url:
        yield url


def receipts(folder: Path) -> list[dict[str, Any]]:
    """All receipts of a gateway, in the order in which they were written. A row that is being written is omitted."""
    files = [file for chain in chains(folder / "data" / "ledger") for file in segments(chain)]
    rows = [json.loads(line) for file in files for line in file.read_bytes().split(b"\n")[:-1]]
    return [complete_receipt(row) for row in rows if row["kind"] == "receipt"]
