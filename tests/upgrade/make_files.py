"""Makes the files that `test_upgrade.py` opens: the state that a release leaves behind.

    python -m tests.upgrade.make_files SOURCE tests/upgrade/RELEASE

`SOURCE` is a checkout of the release. It is driven only through its command line and HTTP, so this script works for
any release. For each kind of shared storage it runs a gateway before a scripted deployment, stops it once, and then
kills it while one call is in flight. It keeps the policies, the ledger, the SQLite files, and every key of Redis as
`DUMP` gives it, with its remaining time to live.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import yaml

from tests.redis_server import start_redis

READY_SECONDS = 60.0
HANGS = "never answer"  # the prompt of the call that is in flight when the gateway is killed
POLICY: dict[str, Any] = {
    "deployments": [
        {
            "name": "only", "provider": "openai", "base_url": "http://127.0.0.1:1/v1", "model": "served",
            "price": {"input": "1", "cached_input": "0.1", "output": "2", "version": "2026-11"},
        }
    ],
    "models": [{"name": "m", "deployments": ["only"]}],
    "responses": {"keep": "3650d"},  # what expires would make the test fail one day
    "batches": {"keep": "3650d"},
    "tenants": [
        {"name": "dev", "limits": {"requests": "600/1m", "tokens": "1M/1m", "concurrency": 8,
                                   "budget": {"amount": "50", "per": "month"}}},
    ],
}  # fmt: skip


class Scripted(BaseHTTPRequestHandler):
    """Answers every chat with one word and its usage; a prompt that says `HANGS` gets no answer."""

    hanging = threading.Event()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if HANGS.encode() in body:
            self.hanging.set()
            time.sleep(3600)
        message = {"role": "assistant", "content": "yes"}
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "served", "choices": [choice]}
        content = json.dumps({**answer, "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def deployment() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


class Release:
    """One data folder of the release at `source`, on one storage."""

    def __init__(self, source: Path, folder: Path, storage: str) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("WARMPATH_", "OTEL_"))}
        self._env = kept | {
            "PYTHONPATH": str(source), "WARMPATH_DATA_DIR": str(folder / "data"), "WARMPATH_REPLICA": "gw",
            "WARMPATH_STORAGE": storage, "WARMPATH_POLICY": str(folder / "policy.yaml"),
        }  # fmt: skip

    def run(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "gateway", *arguments]
        ran = subprocess.run(command, env=self._env, cwd=self.folder, capture_output=True, text=True, check=True)
        return ran.stdout

    @contextlib.contextmanager
    def serving(self, end: signal.Signals) -> Iterator[str]:
        """The URL of its gateway, which is ended by a signal."""
        out = self.folder / "stdout"
        with out.open("wb") as stdout:
            process = subprocess.Popen(
                [sys.executable, "-m", "gateway", "serve", "--port", "0"], env=self._env, cwd=self.folder, stdout=stdout
            )
        deadline = time.monotonic() + READY_SECONDS
        while not (found := re.search(r"warmpath ready on (\S+) policy", out.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, "the gateway did not start"
            time.sleep(0.05)
        try:
            yield found[1]
        finally:
            process.send_signal(end)
            process.wait()


def use(release: Release, url: str) -> dict[str, Any]:
    """A tenant's day at one storage. Returns what the upgrade must still know."""
    (release.folder / "policy.yaml").write_text(
        yaml.safe_dump(POLICY | {"deployments": [POLICY["deployments"][0] | {"base_url": url}]})
    )
    created = json.loads(release.run("keys", "create", "--tenant", "dev", "--id", "old", "--json"))
    headers = {"authorization": f"Bearer {created['key']}"}
    known: dict[str, Any] = {"key": created["key"]}
    with release.serving(signal.SIGTERM) as base, httpx2.Client(base_url=f"{base}/v1", headers=headers) as client:
        for _ in range(3):
            client.post("/chat/completions", json=chat("hello")).raise_for_status()
    with release.serving(signal.SIGKILL) as base:
        client = httpx2.Client(base_url=f"{base}/v1", headers=headers, timeout=READY_SECONDS)
        response = client.post("/responses", json={"model": "m", "input": "remember this"}).raise_for_status().json()
        known["response"] = response["id"]
        line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": chat("in a batch")}
        file = {"file": ("in.jsonl", json.dumps(line).encode())}
        uploaded = client.post("/files", data={"purpose": "batch"}, files=file).raise_for_status().json()
        wanted = {"input_file_id": uploaded["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = client.post("/batches", json=wanted).raise_for_status().json()
        while batch["status"] != "completed":
            time.sleep(0.1)
            batch = client.get(f"/batches/{batch['id']}").raise_for_status().json()
        known["batch"], known["output_file"] = batch["id"], batch["output_file_id"]
        threading.Thread(target=lambda: _ignore(client, chat(HANGS)), daemon=True).start()
        assert Scripted.hanging.wait(READY_SECONDS)  # the ledger has its open call: that is written before it is sent
        Scripted.hanging.clear()
    release.run("usage", "compact")
    known["usage"] = json.loads(release.run("usage", "--json"))
    return known


def _ignore(client: httpx2.Client, body: dict[str, Any]) -> None:
    with contextlib.suppress(httpx2.TransportError):
        client.post("/chat/completions", json=body)


def chat(prompt: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": prompt}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    shutil.rmtree(options.target, ignore_errors=True)
    options.target.mkdir(parents=True)
    policies = options.target / "policies"
    shutil.copytree(options.source / "policies", policies, ignore=lambda _, names: {n for n in names if n[0] == "."})
    (policies / "policy.schema.json").unlink()
    with deployment() as url, tempfile.TemporaryDirectory() as work, contextlib.contextmanager(start_redis)() as redis:
        for storage in ("sqlite", "redis"):
            folder = Path(work) / storage
            folder.mkdir()
            where = redis.url if storage == "redis" else f"sqlite:///{folder / 'warmpath.db'}"
            known = use(Release(options.source.resolve(), folder, where), url)
            target = options.target / storage
            for database in folder.rglob("*.db"):
                with contextlib.closing(sqlite3.connect(database)) as connection:
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # a tenth of the size
            shutil.copytree(folder, target, ignore=shutil.ignore_patterns("stdout", "lock", "removing", "*.db-*"))
            if storage == "redis":
                with redis.client() as client:
                    names = sorted(client.scan_iter())
                    rows = [[n.decode(), client.pttl(n), base64.b64encode(client.dump(n)).decode()] for n in names]
                (target / "redis.json").write_text(json.dumps(rows, indent=0))
            (target / "known.json").write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
