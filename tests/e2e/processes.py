"""Starts the real processes of an end-to-end test, and observes them from outside."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import yaml

from gateway.billing.ledger.chain import chains, segments
from gateway.billing.ledger.rows import complete_receipt
from gateway.core.api_keys import hash_key
from tests.launcher import PYTHON, Process, run_to_end, start_process

ROOT = Path(__file__).parents[2]
START_SECONDS_MAX = 600  # on a machine that is busy with other work
STOP_SECONDS_MAX = 60
PATIENCE_SECONDS = 60  # far longer than any step should take; a test that waits so long fails
ENGINE_CACHE_MIB = 128  # 43,000 tokens; by default an engine writes 1 GiB when it starts
DEMO = "warmpath-demo"
PRICE = {"input": "0.10", "cached_input": "0.01", "output": "0.40", "version": "test"}


def until(
    condition: Callable[..., Any], *, pause_seconds: float = 0.01, patience_seconds: float = PATIENCE_SECONDS
) -> Any:
    """Poll a condition and return its first true value. Only for events that cannot be awaited.

    The condition is called without arguments. In a loop, its parameters' defaults bind the loop's variables.
    """
    end = time.monotonic() + patience_seconds
    while not (answer := condition()):
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(pause_seconds)
    return answer


def clean_environment(**settings: str) -> dict[str, str]:
    """This process's environment without variables that configure Warmpath."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WARMPATH_", "OTEL_"))}
    return kept | {"PYTHONPATH": str(ROOT), "OTEL_BSP_SCHEDULE_DELAY": "100"} | settings


def complete_lines(file: Path) -> list[bytes]:
    """The lines of a file that a process may be writing: what follows the last end of a line is not complete yet."""
    return file.read_bytes().split(b"\n")[:-1]


@dataclass(frozen=True)
class Running:
    process: Process
    url: str
    log: Path  # its stderr

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all series of this name that have these labels."""
        text = httpx2.get(f"{self.url}/metrics", timeout=PATIENCE_SECONDS).text
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in text.splitlines() if re.match(rf"{re.escape(name)}[{{ ]", line)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(item in line for item in wanted))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """End the process with SIGTERM. Returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS_MAX)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the process, like a machine that hangs: its connections stay open and send nothing."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextmanager
def running(command: Sequence[str], folder: Path, ready: str, env: Mapping[str, str]) -> Iterator[Running]:
    """Run a process until the end of the block, then end it with SIGTERM. It must exit with 0.

    Waits for the `ready` pattern, whose first group is the URL. Fails if the log contains a stack trace or an
    extension's report of leaked objects, no matter what the test did.
    """
    folder.mkdir(parents=True, exist_ok=True)
    out, log = folder / "stdout", folder / "stderr"
    process = start_process(command, folder, env, cwd=folder)
    try:
        end = time.monotonic() + START_SECONDS_MAX
        while not (found := re.search(ready, out.read_text())):
            assert process.poll() is None, f"the process ended during its start: {log.read_text()}"
            assert time.monotonic() < end, f"the process is not ready in time: {log.read_text()}"
            time.sleep(0.02)
        started = Running(process, found[1], log)
        yield started
        if process.poll() is None:
            assert started.stop() == 0, log.read_text()
        assert "Traceback" not in log.read_text(), log.read_text()
        assert "leaked" not in log.read_text(), log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextmanager
def engine(folder: Path, *options: str, port: int = 0) -> Iterator[Running]:
    command = [*PYTHON, "backend", "--model", "demo", "--port", str(port), "--num-threads", "1", "--wait-for-kernels"]
    command += options
    if "--num-blocks" not in options:
        command += ["--kv-cache-memory-mib", str(ENGINE_CACHE_MIB)]
    with running(command, folder, r"engine ready on (\S+) model", clean_environment()) as started:
        yield started


@dataclass(frozen=True)
class Gateway(Running):
    ledger: Path

    @property
    def admin_url(self) -> str:
        """URL of the admin API, which `admin_port="0"` turns on."""
        found = re.search(r"the admin API listens on (http://[\d.:]+)", self.log.read_text())
        assert found, self.log.read_text()
        return found[1]

    def client(self, tenant: str = "dev", **options: Any) -> openai.OpenAI:
        given = {"max_retries": 0, "timeout": PATIENCE_SECONDS, "_strict_response_validation": True} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key(tenant), **given)

    def async_client(self, tenant: str = "dev", **options: Any) -> openai.AsyncOpenAI:
        given = {"max_retries": 0, "timeout": PATIENCE_SECONDS, "_strict_response_validation": True} | options
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key(tenant), **given)

    def post(self, path: str, body: Any, tenant: str = "dev", **headers: str) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {key(tenant)}", "content-type": "application/json"} | headers
        return httpx2.post(f"{self.url}/v1/{path}", content=content, headers=headers, timeout=PATIENCE_SECONDS)

    def receipts(self, **fields: Any) -> list[dict[str, Any]]:
        """The ledger's receipts that have these values."""
        return self.rows(kind="receipt", **fields)

    def rows(self, **fields: Any) -> list[dict[str, Any]]:
        """The ledger's rows that have these values. Receipts are complete."""
        files = [file for chain in chains(self.ledger) for file in segments(chain)]
        rows = [json.loads(line) for file in files for line in complete_lines(file)]
        rows = [complete_receipt(row) if row["kind"] == "receipt" else row for row in rows]
        return [row for row in rows if fields.items() <= row.items()]

    def receipt(self, call_id: str) -> dict[str, Any]:
        """The one receipt of a call. Waits for it."""
        (receipt,) = until(lambda: self.receipts(call_id=call_id))
        return dict(receipt)


@contextmanager
def gateway(
    folder: Path,
    policy: Mapping[str, Any] | Path,
    *,
    storage: str = "memory://",
    port: int = 0,
    environment: Mapping[str, str] = MappingProxyType({}),
    module: str = "gateway",
    **settings: str,
) -> Iterator[Gateway]:
    """Run `warmpath serve` with the data folder `folder/data`. Settings are keywords, such as `drain_seconds="5"`.

    `environment` has further variables of the process. `module` may be another one that runs the command.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(policy, Path):
        file = policy
    else:
        file = folder / "policy.yaml"
        file.write_text(yaml.safe_dump(dict(policy)))
    given = {"data_dir": str(folder / "data"), "replica": "gw", "storage": storage} | settings
    env = clean_environment(**{f"WARMPATH_{name.upper()}": value for name, value in given.items()}, **environment)
    command = [*PYTHON, module, "serve", "--policy", str(file), "--port", str(port)]
    with running(command, folder, r"warmpath ready on (\S+) policy", env) as started:
        yield Gateway(started.process, started.url, started.log, Path(given["data_dir"]) / "ledger")


def key(tenant: str) -> str:
    return f"wp-{tenant}-0123456789abcdef"


def tenant(name: str, **fields: Any) -> dict[str, Any]:
    """A tenant with one key, whose id is the tenant's name."""
    return {"name": name, "keys": [{"id": name, "hash": hash_key(key(name), "")}], **fields}


def deployment(name: str, url: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "provider": "warmpath",
        "base_url": f"{url}/v1",
        "model": DEMO,
        "max_concurrency": 64,
        "price": PRICE,
        **fields,
    }


def simple_policy(url: str, **fields: Any) -> dict[str, Any]:
    """A policy of one engine, one model, and the tenant `dev` without limits."""
    return {
        "deployments": [deployment("local", url)],
        "models": [{"name": DEMO, "aliases": ["demo"], "deployments": ["local"]}],
        "tenants": [tenant("dev")],
        **fields,
    }


def warmpath(*arguments: str, cwd: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run the `warmpath` command to its end in the folder `cwd`."""
    env = clean_environment(**{f"WARMPATH_{name.upper()}": value for name, value in settings.items()})
    return run_to_end([*PYTHON, "gateway", *arguments], env, cwd, PATIENCE_SECONDS)


class Wire:
    """A client on a raw socket: the test controls what it sends, how far it reads, and when it disconnects."""

    def __init__(
        self, server: Running, path: str, body: Mapping[str, Any], tenant: str = "dev", **headers: str
    ) -> None:
        address = urlsplit(server.url)
        content = json.dumps(body).encode()
        lines = {"host": "x", "authorization": f"Bearer {key(tenant)}", "content-length": str(len(content)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._socket = socket.create_connection((address.hostname, address.port), timeout=PATIENCE_SECONDS)
        self._socket.sendall(f"POST /v1/{path} HTTP/1.1\r\n{head}\r\n".encode() + content)
        self.received = b""

    def read_until(self, mark: bytes, *, times: int = 1) -> bytes:
        """Read until `mark` was received so many times. Returns all received bytes."""
        while self.received.count(mark) < times:
            part = self._socket.recv(65536)
            assert part, f"the connection was closed after {self.received!r}"
            self.received += part
            assert self.received.startswith(b"HTTP/1.1 200"), self.received
        return self.received

    def read_reply(self) -> tuple[int, Any]:
        """Read a complete reply that is not a stream. Returns its status and JSON."""
        reply = http.client.HTTPResponse(self._socket)
        reply.begin()
        return reply.status, json.loads(reply.read())

    def read_status(self) -> int:
        """Read the beginning of a reply. Returns its status."""
        reply = http.client.HTTPResponse(self._socket)
        reply.begin()
        return reply.status

    def read_to_end(self) -> bytes:
        """Read to the end of a reply that closes the connection or ends with an empty chunk. Returns all bytes."""
        while not self.received.endswith(b"\r\n0\r\n\r\n") and (part := self._socket.recv(65536)):
            self.received += part
        return self.received

    def header(self, name: str) -> str:
        head = self.read_until(b"\r\n\r\n").split(b"\r\n\r\n")[0].decode()
        found = re.search(rf"^{re.escape(name)}: (.*?)\r?$", head, re.MULTILINE | re.IGNORECASE)
        assert found, head
        return found[1]

    def leave(self) -> None:
        self._socket.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


class IdleConnection:
    """A keep-alive connection that has got one reply and waits for nothing."""

    def __init__(self, server: Running) -> None:
        address = urlsplit(server.url)
        self._socket = socket.create_connection((address.hostname, address.port), timeout=PATIENCE_SECONDS)
        self._socket.sendall(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
        reply = http.client.HTTPResponse(self._socket)
        reply.begin()
        assert reply.status == 200, reply.read()
        reply.read()

    def wait_until_closed(self) -> None:
        assert self._socket.recv(1) == b""

    def __enter__(self) -> IdleConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def chat(prompt: str = "What is prefix caching?", **fields: Any) -> dict[str, Any]:
    return {"model": DEMO, "messages": [{"role": "user", "content": prompt}], **fields}


def endless(prompt: str = "Count.", **fields: Any) -> dict[str, Any]:
    """A request for an answer that nearly fills the model's context. It takes seconds, or one on a fast machine."""
    return chat(prompt, stream=True, max_tokens=1800, ignore_eos=True, **fields)


def events(text: str) -> list[Any]:
    """The JSON events of a complete stream."""
    *frames, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames if not frame.startswith(":")]


def text_of(chunks: list[Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
