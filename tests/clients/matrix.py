"""Installs each client in an environment of its own, runs its program against a gateway, and writes the results.

`python -m tests.clients.matrix` installs the newest releases, so that a release that breaks is seen. `--engine` runs
the programs against the bundled engine, too. Each program is a file in `programs/`, and must end with exit code 0.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.e2e.faults.upstreams import Request, listening
from tests.e2e.processes import DEMO, ROOT, Gateway, engine, gateway, key, simple_policy

FOLDER = ROOT / "build" / "clients"
PAGE = ROOT / "docs" / "reference" / "clients.md"
PROGRAMS = Path(__file__).parent / "programs"
INSTALL_SECONDS_MAX = 900
RUN_SECONDS_MAX = 240
ERROR_CHARACTERS = 160


class Client(NamedTuple):
    """One client: its package, whose version the table shows, further packages, and its program."""

    package: str
    program: str
    others: tuple[str, ...] = ()


CLIENTS = (
    Client("openai", "openai_python"),
    Client("anthropic", "anthropic_python"),
    Client("langchain-openai", "langchain_openai_client"),
    Client("langgraph", "langgraph_agent", ("langchain-openai",)),
    Client("llama-index-llms-openai-like", "llama_index_client"),
    Client("pydantic-ai-slim", "pydantic_ai_agent", ("openai",)),
    Client("openai-agents", "openai_agents_run"),
    Client("litellm", "litellm_client"),
    Client("instructor", "instructor_client"),
)


class Result(NamedTuple):
    """How a client's run ended. `details` are empty if it succeeded."""

    package: str
    version: str
    against: str
    details: str


async def answer(request: Request) -> None:
    await request.whole(5)


@contextlib.contextmanager
def gateways(*, with_engine: bool) -> Iterator[dict[str, Gateway]]:
    """The gateways by what is behind them."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        upstreams = stack.enter_context(listening({"scripted": answer}))
        deployments = [{"name": "d", "base_url": f"http://127.0.0.1:{upstreams.ports['scripted']}/v1", "model": "m"}]
        policy = simple_policy("http://unused", deployments=deployments, models=[{"name": "m", "deployments": ["d"]}])
        found = {"scripted server": stack.enter_context(gateway(folder / "scripted", policy))}
        if with_engine:
            started = stack.enter_context(engine(folder / "engine"))
            models = [{"name": DEMO, "aliases": ["m"], "deployments": ["local"]}]
            found["bundled engine"] = stack.enter_context(
                gateway(folder / "front", simple_policy(started.url, models=models))
            )
        yield found


def install(client: Client) -> tuple[Path, str]:
    """Install the newest release. Returns the environment's Python, and the version or why it cannot be installed."""
    folder = FOLDER / client.program
    venv.create(folder, with_pip=True, clear=False)
    python = folder / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--upgrade"]
    installed = subprocess.run(
        [*command, client.package, *client.others], capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX
    )
    if installed.returncode:
        return python, ""
    asked = [str(python), "-c", f"import importlib.metadata as m; print(m.version({client.package!r}))"]
    return python, subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def run(client: Client, python: Path, front: Gateway) -> str:
    """Run a client's program. Returns the last line of its errors, or nothing if it succeeded."""
    ours = ("OPENAI_", "ANTHROPIC_", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env = {
        **kept, "OPENAI_BASE_URL": f"{front.url}/v1", "OPENAI_API_KEY": key("dev"),
        "ANTHROPIC_BASE_URL": front.url, "ANTHROPIC_API_KEY": key("dev"),
    }  # fmt: skip
    try:
        ended = subprocess.run(
            [str(python), str(PROGRAMS / f"{client.program}.py")],
            env=env, capture_output=True, text=True, timeout=RUN_SECONDS_MAX,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end within {RUN_SECONDS_MAX} s"
    if ended.returncode == 0:
        return ""
    return (ended.stderr.strip().splitlines() or ["no output"])[-1][:ERROR_CHARACTERS]


def page(results: Sequence[Result], day: str, python: str) -> str:
    """The table as a page."""
    rows = [f"| {r.package} | {r.version} | {r.against} | {r.details or 'works'} |\n" for r in results]
    return (
        "# Clients that were run\n\n"
        f"`make test-clients` wrote this page on {day} with Python {python}. It installs the newest release of each\n"
        "client, and runs a short program against a gateway in front of a scripted server or the bundled engine. The\n"
        "programs are in `tests/clients/programs`.\n\n"
        "| Package | Version | In front of | Result |\n|---|---|---|---|\n" + "".join(rows)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", action="store_true", help="run against the bundled engine, too")
    parser.add_argument("--only", nargs="*", default=[], help="packages to run; default: all. Writes no page.")
    arguments = parser.parse_args()
    results: list[Result] = []
    with gateways(with_engine=arguments.engine) as fronts:
        for client in CLIENTS:
            if arguments.only and client.package not in arguments.only:
                continue
            python, version = install(client)
            for against, front in fronts.items() if version else ():
                results.append(Result(client.package, version, against, run(client, python, front)))
                print(*results[-1], flush=True)
            if not version:
                print(client.package, "cannot be installed", flush=True)
    if not arguments.only:
        day = datetime.datetime.now(datetime.UTC).date().isoformat()
        PAGE.write_text(page(results, day, ".".join(map(str, sys.version_info[:2]))))
    return int(any(result.details for result in results))


if __name__ == "__main__":
    sys.exit(main())
