"""The imports of a start: torch's library is loaded before torch, and the collector is as before."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

LOADS_THE_LIBRARY = """
import sys
from pathlib import Path
from backend import torch_library
loaded = torch_library.load_library()
print(loaded, loaded == ("libtorch_cpu.so" in Path("/proc/self/maps").read_text()), "torch" in sys.modules)
torch_library.LIBRARY = Path("lib", "missing.so")
print(torch_library.load_library())
"""
IMPORTS = """
import gc, sys
from backend import early_imports
print("torch" in sys.modules, gc.isenabled(), gc.get_freeze_count() > 10_000)
"""


def output_of(program: str) -> list[str]:
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return run.stdout.split()


@pytest.mark.skipif(sys.platform != "linux", reason="the library is loaded early on Linux only")
def test_the_library_is_loaded_without_torch() -> None:
    loaded, is_mapped, has_torch, found_missing = output_of(LOADS_THE_LIBRARY)
    assert (is_mapped, has_torch, found_missing) == ("True", "False", "False")
    assert loaded == "True" or "+cpu" not in version("torch")


def test_the_collector_runs_again_and_skips_what_was_imported() -> None:
    assert output_of(IMPORTS) == ["True", "True", "True"]
