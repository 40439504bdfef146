"""Replays the conversations through the gateway to a real vLLM on the CPU, with KV events and load metrics.

vLLM is not installed with Warmpath: `--vllm` names the command of an environment that has it. It serves the demo model
with a longer context, once with a KV cache that holds all conversations and once with one that does not. It is
configured to publish KV events and to report cached tokens. The conversations and the figures are those of `run.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.warm_paths.conversations import conversations
from benchmarks.warm_paths.run import RESULTS, Tokenizer, figures, machine, replay
from benchmarks.warm_paths.stack import CONTEXT_TOKENS, MODEL, gateway, long_demo_model, receipts, running

READY = r"(Application startup complete|Uvicorn running on)"


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


@contextlib.contextmanager
def vllm(command: str, folder: Path, model: Path, num_blocks: int) -> Iterator[dict[str, Any]]:
    """Run vLLM. Yields its deployment, as in a policy."""
    port, events, replays = free_ports(3)
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replays}",
        "topic": "kv-events",
    }
    options = ["serve", str(model), "--served-model-name", MODEL, "--dtype", "bfloat16", "--host", "127.0.0.1"]
    options += ["--port", str(port), "--max-model-len", str(CONTEXT_TOKENS), "--enable-prompt-tokens-details"]
    options += ["--num-gpu-blocks-override", str(num_blocks), "--kv-events-config", json.dumps(config)]
    options += ["--enforce-eager"]  # compiling takes minutes, and does not affect the caches
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with running([command, *options], folder, READY, seconds=600, **settings):
        yield {
            "name": "vllm",
            "provider": "vllm",
            "base_url": f"http://127.0.0.1:{port}/v1",
            "model": MODEL,
            "kv_events": f"tcp://127.0.0.1:{events}",
            "kv_events_replay": f"tcp://127.0.0.1:{replays}",
            "metrics": True,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="command that starts vLLM, such as /opt/vllm/bin/vllm")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=3)
    parser.add_argument(
        "--blocks", type=int, nargs="*", default=[1000, 130], help="KV cache blocks of 128 tokens, for each size"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/warm_paths/results)")
    args = parser.parse_args()
    source, work = conversations(args.conversations, args.seed)
    tenants = sorted({conversation.tenant for conversation in work})
    runs = []
    for blocks in args.blocks:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            with (
                vllm(args.vllm, folder / "vllm", long_demo_model(folder), blocks) as deployment,
                gateway(folder / "gw", [deployment], tenants) as url,
            ):
                began = time.monotonic()
                served = asyncio.run(replay(url, work, args.concurrency))
                seconds = time.monotonic() - began
                metrics, rows = httpx2.get(f"{url}/metrics").text, receipts(folder / "gw")
                measured = figures(served, work, Tokenizer(deployment["base_url"]), rows, metrics)
            runs.append({"engine": "vllm", "blocks": blocks, "seconds": round(seconds, 1), **measured})
        print(json.dumps(runs[-1]), flush=True)
    now = datetime.datetime.now(datetime.UTC)
    setup = {"trace": source, "concurrency": args.concurrency, "conversations": len(work)}
    result = {"at": now.isoformat(timespec="seconds"), "machine": machine(), **setup, "runs": runs}
    out = args.out or RESULTS
    out.mkdir(parents=True, exist_ok=True)
    (out / f"vllm-{now:%Y%m%d-%H%M%S}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
