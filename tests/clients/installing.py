"""Installs the newest release of a client in an environment of its own, under `build/clients`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from tests.e2e.processes import ROOT

FOLDER = ROOT / "build" / "clients"
INSTALL_SECONDS_MAX = 1200
ERROR_CHARACTERS = 160
DAY_SECONDS = 24 * 3600


class Client(NamedTuple):
    """One client: its package, whose version the table shows, its program, and what else is installed.

    `program` is a file in `programs/`. One that ends with `.mjs` runs in Node.js, in the environment's folder. One that
    ends with `.py` runs in the environment's Python, or for a package of npm in this process's Python.
    """

    package: str
    program: str
    others: tuple[str, ...] = ()
    registry: Literal["pypi", "npm"] = "pypi"
    extra: str = ""  # of the Python package
    does: str = ""  # what the program does, for the table
    node: str = ""  # the release of Node.js that it needs, from npm; empty: the one that is installed

    @property
    def folder(self) -> Path:
        return FOLDER / self.program.replace(".", "_")

    @property
    def binaries(self) -> Path:
        """Where its commands are."""
        return self.folder / ("bin" if self.registry == "pypi" else "node_modules/.bin")


def environment_of(client: Client) -> dict[str, str]:
    """The variables of this process, with the client's own Node.js first in the path if it needs one."""
    env = dict(os.environ)
    if client.node:
        env["PATH"] = f"{client.binaries}{os.pathsep}{env['PATH']}"
    return env


class CannotInstall(Exception):
    """Why a client cannot be installed."""


def install(client: Client, *, upgrade: bool = True) -> str:
    """Install or upgrade a client. Returns its version. Raises `CannotInstall`.

    With `upgrade=False`, an installed release is kept.
    """
    client.folder.mkdir(parents=True, exist_ok=True)
    return _with_pip(client, upgrade) if client.registry == "pypi" else _with_npm(client, upgrade)


def _with_pip(client: Client, upgrade: bool) -> str:
    """Install with uv if it is there, which needs a small part of pip's time, else with pip."""
    python, uv = client.binaries / "python", shutil.which("uv")
    asked = [str(python), "-c", f"import importlib.metadata as m; print(m.version({client.package!r}))"]
    if not upgrade and python.exists():
        with contextlib.suppress(CannotInstall):
            return _run(asked, client.folder, os.environ).strip()
    if not python.exists() and uv is not None:
        _run([uv, "venv", "-q", "--python", sys.executable, str(client.folder), "--clear"], FOLDER, os.environ)
    elif not python.exists():
        venv.create(client.folder, with_pip=True)
    wanted = f"{client.package}[{client.extra}]" if client.extra else client.package
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    install = pip if uv is None else [uv, "pip", "install", "-q", "--python", str(python)]
    _run([*install, "--upgrade", wanted, *client.others], client.folder, os.environ)
    return _run(asked, client.folder, os.environ).strip()


def _with_npm(client: Client, upgrade: bool) -> str:
    described = client.folder / "node_modules" / client.package / "package.json"
    if upgrade or not described.exists():
        (client.folder / "package.json").write_text('{"private": true}\n')
        names = [f"{name}@latest" for name in (client.package, *client.others)]
        install = ["npm", "install", "--no-audit", "--no-fund"]
        if client.node:  # first, because npm must run in it: packages compile or select binaries for it
            _run([*install, f"node@{client.node}"], client.folder, os.environ)
        _run([*install, *names], client.folder, environment_of(client))
    return str(json.loads(described.read_text())["version"])


def _run(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> str:
    try:
        ended = subprocess.run(
            command, cwd=folder, env=dict(env), capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        raise CannotInstall(str(error)[:ERROR_CHARACTERS]) from error
    if ended.returncode:
        lines = (ended.stderr or ended.stdout).strip().splitlines() or ["no output"]
        raise CannotInstall(lines[-1][:ERROR_CHARACTERS])
    return ended.stdout
