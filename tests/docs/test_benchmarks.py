import json
import subprocess
import sys
from collections.abc import Mapping

import pytest

from tests.docs.markdown import ROOT, blocks

pytestmark = pytest.mark.slow

COMMANDS = [line for block in blocks(ROOT / "benchmarks" / "README.md") for line in block.text.splitlines()]
# Runs each command as `python` does and prints what each has printed, by command. One process does this for all
# commands, since most of them import torch.
SCRIPT = """
import contextlib, io, json, os, runpy, sys

printed = {}
for command in json.load(sys.stdin):
    _, *words = command.split()
    is_module = words[0] == "-m"
    name, *arguments = words[is_module:]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(name)
    sys.argv = [name, *arguments, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    printed[command] = output.getvalue()
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def printed() -> Mapping[str, str]:
    """What each command prints with `--help`."""
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, input=json.dumps(COMMANDS), capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    found: Mapping[str, str] = json.loads(finished.stdout)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_a_benchmark_starts(command: str, printed: Mapping[str, str]) -> None:
    """Running one to its end would need a machine of its own."""
    assert command.startswith("python ")
    assert printed[command].startswith("usage: ")
