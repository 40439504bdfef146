"""The base level on ARM (NEON) against the base level of this machine, which the other tests verify."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.backend.native.libraries import PARTS

CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
DRIVER = Path(__file__).with_name("levels.cpp")
FLAGS = ("-std=c++17", "-O1", "-pthread", "-static", "-w")

if not (shutil.which(CROSS) and shutil.which(EMULATOR) and shutil.which("g++")):
    pytest.skip(f"{CROSS} and {EMULATOR} are not both installed", allow_module_level=True)


def output(compiler: str, runner: tuple[str, ...], directory: Path) -> list[tuple[str, list[float]]]:
    program = directory / compiler
    subprocess.run([compiler, *FLAGS, str(DRIVER), *map(str, PARTS), "-o", str(program)], check=True)
    printed = subprocess.run([*runner, str(program)], check=True, capture_output=True, text=True).stdout
    return [(name, [float(v) for v in values]) for name, *values in map(str.split, printed.splitlines())]


def test_neon_gives_the_results_of_the_base_level_here(tmp_path: Path) -> None:
    ours, theirs = output("g++", (), tmp_path), output(CROSS, (EMULATOR,), tmp_path)
    assert len(ours) == 86
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for i, (_, values) in enumerate(theirs):
        assert values == pytest.approx(ours[i][1], rel=1e-4 if i < 21 else 1e-2, abs=1e-3 if i < 21 else 1e-2)
