"""The openai client for JavaScript, installed once for all tests that run it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent / "e2e" / "node"
INSTALL_SECONDS_MAX = 120


@pytest.fixture(scope="session")
def node_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with its dependencies installed, so that nothing is written to the checkout."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    copy = Path(shutil.copytree(PROJECT, tmp_path_factory.mktemp("npm") / "node"))
    install = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    installed = subprocess.run(install, cwd=copy, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX)
    offline = any(sign in installed.stderr for sign in ("ENOTFOUND", "ECONNREFUSED", "EAI_AGAIN"))
    if installed.returncode != 0 and offline:
        pytest.skip(f"npm could not install the packages: {installed.stderr.splitlines()[0]}")
    assert installed.returncode == 0, installed.stderr
    return copy
