"""Runs inference servers behind the gateway, each in an environment of its own, and writes what they kept to a file.

`python -m tests.servers.matrix` installs the newest releases. The results are in `results.json`, from which
`python -m docs.generate` makes a table of docs/reference/servers.md. A server that cannot be installed is skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

from tests.e2e.processes import PRICE, gateway, simple_policy
from tests.ports import free_port
from tests.servers.catalogue import FOLDER, SERVERS, Server
from tests.servers.contract import kept_by

RESULTS = Path(__file__).with_name("results.json")
INSTALL_SECONDS_MAX = 1200
START_SECONDS_MAX = 600
STOP_SECONDS_MAX = 30
WHEELS = "/opt/wheels"  # where a machine without a fast network may have torch's CPU build


class CannotRun(Exception):
    """Why a server cannot be installed or started."""


def install(server: Server, *, upgrade: bool) -> str:
    """Install a server. Returns its version. Raises `CannotRun`."""
    python, uv = server.environment / "bin" / "python", shutil.which("uv")
    asked = [str(python), "-c", f"import importlib.metadata as m; print(m.version({server.package!r}))"]
    if not upgrade and python.exists():
        with contextlib.suppress(CannotRun):
            return _run(asked).strip()
    if not python.exists() and uv is not None:
        _run([uv, "venv", "-q", "--python", sys.executable, "--clear", str(server.environment)])
    elif not python.exists():
        venv.create(server.environment, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    command = pip if uv is None else [uv, "pip", "install", "-q", "--python", str(python)]
    wheels = ["--find-links", WHEELS] if Path(WHEELS).is_dir() else []
    package = f"{server.package}[{server.extra}]" if server.extra else server.package
    _run([*command, *wheels, "--upgrade", package, *server.others])
    if server.without and uv is None:
        _run([str(python), "-m", "pip", "uninstall", "-q", "-y", *server.without])
    elif server.without:
        _run([str(uv), "pip", "uninstall", "-q", "--python", str(python), *server.without])
    return _run(asked).strip()


def _run(command: list[str]) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotRun(str(error)) from error
    if ended.returncode:
        raise CannotRun((ended.stderr.strip().splitlines() or ["no output"])[-1])
    return ended.stdout


@contextlib.contextmanager
def started(server: Server, folder: Path) -> Iterator[str]:
    """Run a server until the end of the block. Yields its URL. Raises `CannotRun`."""
    port = free_port()
    env = {**os.environ, **dict(server.variables)}
    env["PATH"] = f"{server.environment / 'bin'}:{env['PATH']}"
    log = FOLDER / f"{server.environment.name}.log"
    with log.open("wb") as output:
        command = list(server.command(folder, port))
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)
    try:
        end = time.monotonic() + START_SECONDS_MAX
        while not _answers(f"http://127.0.0.1:{port}/v1/models"):
            if process.poll() is not None or time.monotonic() > end:
                raise CannotRun(f"it does not start; see {log}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx2.TransportError):
        return httpx2.get(url, timeout=5).status_code == 200
    return False


def run(server: Server) -> dict[str, str]:
    """Start a server, and check the contract through a gateway. Raises `CannotRun`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with started(server, folder) as url:
            deployment = {"name": "d", "provider": server.provider, "base_url": f"{url}/v1", "model": server.model}
            models = [{"name": "m", "deployments": ["d"]}]
            policy = simple_policy(url, deployments=[{**deployment, "price": PRICE}], models=models)
            with gateway(folder / "gateway", policy) as front:
                return kept_by(front, server.parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="names of servers; default: all")
    parser.add_argument("--installed", action="store_true", help="run what is installed, and look for no newer release")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = False
    for server in SERVERS:
        if arguments.only and server.name not in arguments.only:
            continue
        try:
            version = install(server, upgrade=not arguments.installed)
            found = run(server)
        except CannotRun as problem:
            print(f"{server.name}: {problem}", flush=True)
            continue
        print(server.name, version, found, flush=True)
        day = datetime.datetime.now(datetime.UTC).date().isoformat()
        about = {"package": server.package, "provider": server.provider, "version": version, "day": day}
        results[server.name] = {**about, "found": found}
        failed = failed or any(text.startswith("failed") for text in found.values())
        RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
