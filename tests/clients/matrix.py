"""Installs each client in an environment of its own, runs its program against a gateway, and writes the results.

`python -m tests.clients.matrix` installs the newest releases, so that a release that breaks is seen. `--engine` runs
the programs against the bundled engine, too. Each program is a file in `programs/`, and must end with exit code 0.

Programs find the gateway in `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`, the
folder of their client's commands in `CLIENT_BINARIES`, and in `AGAINST` whether the server follows prompts as
`scripted.py` says (`scripted`) or answers what it likes (`engine`). They run in an empty folder, which is their home.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.clients import scripted
from tests.clients.catalogue import CLIENTS
from tests.clients.installing import ERROR_CHARACTERS, FOLDER, CannotInstall, Client, environment_of, install
from tests.e2e.faults.upstreams import Upstreams, listening
from tests.e2e.processes import ROOT, Gateway, engine, gateway, key, simple_policy

PAGE = ROOT / "docs" / "reference" / "clients.md"
PROGRAMS = Path(__file__).parent / "programs"
MODEL = ROOT / "backend" / "demo_model" / "weights"
RUN_SECONDS_MAX = 900
# Coding agents send prompts of 20,000 tokens. The bundled model was trained for fewer, so its answers make no sense.
CONTEXT_TOKENS = 65_536
CACHE_MIB = 512
# Coding agents send more to a model whose name they know.
MODELS = ("m", "gpt-*", "claude-*")
PATIENT = {"ttft": "300s", "total": "900s"}  # for prompts of coding agents, on the cores that the clients use, too
STORED = {"keep": "1h"}  # of responses and threads
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
RESULTS = Path(__file__).with_name("results.json")
INTRODUCTION = """# Clients that were run

`make test-clients` installs the newest release of each client, and runs a short program against a gateway in front of
a scripted server or the bundled engine. This page has the last run of each client. The programs are in
`tests/clients/programs`, and the results in `tests/clients/results.json`. The bundled model sees no images and its
answers to agents make no sense, so in front of the engine a run checks only that all requests and answers are valid.

| Client | Version | What it did | In front of | Result | Day |
|---|---|---|---|---|---|
"""
NAMES = {"scripted": "scripted server", "engine": "bundled engine"}


class Result(NamedTuple):
    """How a client's run ended. `error` is empty if it succeeded."""

    client: Client
    version: str
    against: str
    error: str


@contextlib.contextmanager
def gateways(folder: Path, *, with_engine: bool) -> Iterator[tuple[dict[str, Gateway], Upstreams]]:
    """The gateways by what is behind them, and the scripted server."""
    with contextlib.ExitStack() as stack:
        upstreams = stack.enter_context(listening({"scripted": scripted.answer}))
        url = f"http://127.0.0.1:{upstreams.ports['scripted']}/v1"
        served = {"provider": "openai", "base_url": url, "model": "served"}
        policy = simple_policy(
            "http://unused",
            deployments=[{"name": "scripted", **served}],
            models=[{"name": name, "deployments": ["scripted"]} for name in MODELS],
            responses=STORED,
        )
        found = {"scripted": stack.enter_context(gateway(folder / "scripted", policy))}
        if with_engine:
            model = _with_long_context(folder / "model")
            options = ("--model", str(model), "--kv-cache-memory-mib", str(CACHE_MIB))
            started = stack.enter_context(engine(folder / "engine", *options))
            models = [{"name": name, "deployments": ["local"]} for name in MODELS]
            policy = simple_policy(started.url, models=models, responses=STORED, classes={"realtime": PATIENT})
            policy["deployments"][0]["model"] = model.name
            found["engine"] = stack.enter_context(gateway(folder / "front", policy))
        yield found, upstreams


def _with_long_context(folder: Path) -> Path:
    """A copy of the bundled model whose configuration allows long prompts."""
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT_TOKENS}))
    return folder


def run(client: Client, against: str, front: Gateway) -> str:
    """Run a client's program. Returns the last line of its errors, or nothing if it succeeded."""
    program = PROGRAMS / client.program
    if program.suffix == ".mjs":  # Node.js looks for packages beside the file
        program = Path(shutil.copy(program, client.folder))
        command = ["node", str(program)]
    else:
        python = client.binaries / "python" if client.registry == "pypi" else Path(sys.executable)
        command = [str(python), str(program)]
    ours = ("OPENAI_", "ANTHROPIC_", "PYTHON", "CLAUDE", "CODEX", "WARMPATH_")
    kept = {name: value for name, value in environment_of(client).items() if not name.startswith(ours)}
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix="home-", ignore_cleanup_errors=True) as home:
        env = {
            **kept, "OPENAI_BASE_URL": f"{front.url}/v1", "OPENAI_API_KEY": key("dev"),
            "ANTHROPIC_BASE_URL": front.url, "ANTHROPIC_API_KEY": key("dev"), "AGAINST": against,
            "CLIENT_BINARIES": str(client.binaries), "HOME": home, "PWD": home, "TOKENIZER": str(MODEL),
        }  # fmt: skip
        try:
            ended = subprocess.run(
                command, env=env, cwd=home, capture_output=True, text=True, timeout=RUN_SECONDS_MAX,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired as expired:
            (FOLDER / f"{client.program}.{against}.log").write_bytes(expired.stdout or b"")
            return f"no end within {RUN_SECONDS_MAX} s"
    output = _COLOUR.sub("", f"{ended.stdout}\n{ended.stderr}").strip()
    (FOLDER / f"{client.program}.{against}.log").write_text(output)
    if ended.returncode == 0:
        return ""
    return (output.splitlines() or ["no output"])[-1][:ERROR_CHARACTERS]


def page(results: Mapping[str, Any]) -> str:
    """The table as a page. `results` are those of `results.json`: by program, and by what was behind the gateway."""
    rows = [
        f"| {client.package} ({_registry(client)}) | {result['version']} "
        f"| {client.does} | {NAMES[against]} | {result['error'] or 'works'} | {result['day']} |\n"
        for client in CLIENTS
        for against, result in results.get(client.program, {}).items()
    ]
    return INTRODUCTION + "".join(rows)


def _registry(client: Client) -> str:
    if client.registry == "pypi":
        return "Python"
    return f"npm, Node.js {client.node}" if client.node else "npm"


def run_all(only: Sequence[str], *, with_engine: bool, upgrade: bool = True) -> Iterator[Result]:
    """Run the clients one after the other. `only` has packages or programs; if it is empty, all run."""
    with (
        tempfile.TemporaryDirectory() as folder,
        gateways(Path(folder), with_engine=with_engine) as (fronts, upstreams),
    ):
        for client in CLIENTS:
            if only and client.package not in only and client.program not in only:
                continue
            try:
                version = install(client, upgrade=upgrade)
            except CannotInstall as error:
                yield Result(client, "", "scripted", f"cannot be installed: {error}"[:ERROR_CHARACTERS])
                continue
            for against, front in fronts.items():
                yield Result(client, version, against, run(client, against, front))
            received = [request.body for request in upstreams.requests["scripted"]]
            (FOLDER / f"{client.program}.requests.json").write_text(json.dumps(received, indent=1))
            upstreams.requests["scripted"].clear()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", action="store_true", help="run against the bundled engine, too")
    parser.add_argument("--only", nargs="*", default=[], help="packages or programs; default: all")
    parser.add_argument("--installed", action="store_true", help="run what is installed, and look for no newer release")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    failed = False
    for result in run_all(arguments.only, with_engine=arguments.engine, upgrade=not arguments.installed):
        print(result.client.package, *result[1:], flush=True)
        failed = failed or bool(result.error)
        results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        day = datetime.datetime.now(datetime.UTC).date().isoformat()
        row = {"version": result.version, "day": day, "error": result.error}
        results.setdefault(result.client.program, {})[result.against] = row
        RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
        PAGE.write_text(page(results))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
