import subprocess
import sys

import pytest

from tests.docs.markdown import ROOT, blocks

pytestmark = pytest.mark.slow

COMMANDS = [line for block in blocks(ROOT / "benchmarks" / "README.md") for line in block.text.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_benchmark_starts(command: str) -> None:
    """Running one to its end would need a machine of its own."""
    python, *arguments = command.split()
    assert python == "python"
    finished = subprocess.run([sys.executable, *arguments, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert finished.stdout.startswith("usage: "), finished.stderr
