"""What a newcomer has after `make up`: a checkout, and an engine and a gateway that run in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest

from tests.docs.markdown import ROOT, Block, blocks
from tests.e2e.processes import PATIENCE_SECONDS, chat, clean_environment, running, until
from tests.otlp_collector import Collector, collecting
from tests.ports import free_port

README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
KEY = next(iter(re.findall(r"^export OPENAI_API_KEY=(\S+)$", README.read_text(), re.MULTILINE)))
ADMIN_KEY = next(iter(re.findall(r"#key=(wpa-\w+)$", README.read_text(), re.MULTILINE)))
NOT_IN_A_CHECKOUT = {".git", ".venv", ".warmpath", "policies"}


@dataclass(frozen=True)
class Stack:
    """What `make up` leaves a newcomer with."""

    url: str
    engine_url: str
    dashboard_url: str
    checkout: Path
    collector: Collector
    printed: dict[Block, str] = field(default_factory=dict)  # by the blocks that have run

    def here(self, text: str) -> str:
        """A block as it must read on this machine: free ports in place of the README's."""
        for documented, actual in ((8080, self.url), (8081, self.engine_url), (8082, self.dashboard_url)):
            text = text.replace(f"http://127.0.0.1:{documented}", actual)
        return re.sub(r"--port \d+", "--port 0", text)

    def bash(self, block: Block, command: str) -> subprocess.CompletedProcess[str]:
        """Run it in a shell with the exports of the blocks before it; a how-to page has the tutorial's, too."""
        before = [earlier for earlier in blocks(block.page) if earlier.line < block.line]
        if block.page.parent.name == "how-to":
            before = [*blocks(TUTORIAL), *before]
        lines = [line for earlier in before if earlier.language == "bash" for line in earlier.text.splitlines()]
        exports = [line for line in lines if line.startswith("export ")]
        script = self.here("\n".join([*exports, command]))
        finished = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.checkout, env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE_SECONDS,
        )  # fmt: skip
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    checkout = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name not in NOT_IN_A_CHECKOUT:
            (checkout / path.name).symlink_to(path)
    (checkout / ".venv").symlink_to(sys.prefix)
    engine_url = f"http://127.0.0.1:{free_port()}"
    shutil.copytree(ROOT / "policies", checkout / "policies")
    policy = checkout / "policies" / "default.yaml"
    policy.write_text(policy.read_text().replace("http://127.0.0.1:8081", engine_url))

    recipe = make("--dry-run", "--assume-old=install", "up").split()
    assert recipe == [".venv/bin/warmpath", "up"]
    with collecting() as collector:
        env = clean_environment(
            WARMPATH_PORT="0", WARMPATH_POLICY=str(policy), WARMPATH_DEV_KEY=KEY, WARMPATH_OTLP_ENDPOINT=collector.url,
            WARMPATH_ADMIN_PORT="0", WARMPATH_ADMIN_KEY=ADMIN_KEY,
        )  # fmt: skip
        with running(recipe, checkout, r"base URL +(\S+)/v1", env) as up:
            found = until(lambda: re.search(r"dashboard +(http://[\d.:]+)/#key=", (checkout / "stdout").read_text()))
            headers = {"authorization": f"Bearer {KEY}"}  # one request, so that there is a bill to read
            httpx2.post(f"{up.url}/v1/chat/completions", json=chat(max_tokens=4), headers=headers).raise_for_status()
            yield Stack(up.url, engine_url, found[1], checkout, collector)


def make(*arguments: str) -> str:
    """What it prints, also where it was make that started the tests."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    finished = subprocess.run(["make", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return finished.stdout
