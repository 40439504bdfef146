"""Compiling the kernels in another process: its progress, its priority, and how it ends."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from backend.native import background, compiler, library
from backend.native.background import COMMAND, NICENESS, BackgroundCompilation
from backend.native.compiler import BuildError
from tests.e2e.processes import until

if library.load() is None:
    pytest.skip("there is no compiler here", allow_module_level=True)
STORED = compiler.find(compiler.CPU)[0]  # the output of fake compilers


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty cache folder of processes that this test starts. `c++` is the compiler that a test writes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    sources = tmp_path / "native"  # without compiled/
    sources.mkdir()
    for path in (*compiler.SOURCES.glob("*.py"), *compiler.SOURCES.glob("*.cpp")):
        shutil.copy(path, sources)
    shutil.copytree(compiler.SOURCES / "kernels", sources / "kernels")
    return tmp_path / "cache" / "warmpath" / "kernels"


def command(tmp_path: Path) -> tuple[str, ...]:
    copied = tmp_path / "native" / "compiler.py"
    return tuple(str(copied) if part == compiler.__file__ else part for part in COMMAND)


def write_compiler(tmp_path: Path, script: str) -> None:
    """A program that runs `script` instead of a compiler. It gets the output's path in $last."""
    path = tmp_path / "c++"
    path.write_text(f"#!/bin/sh\nfor last; do :; done\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


def test_the_best_level_is_compiled_into_the_cache(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_compiler(tmp_path, f'nice >> {tmp_path / "priorities"}\ncp {STORED} "$last"')
    compilation = BackgroundCompilation(command(tmp_path))
    with caplog.at_level(logging.INFO, background.__name__):
        compilation.wait()
    compilation.stop()
    best = compiler.LEVELS[compiler.best_level()]
    assert {path.name for path in cache.iterdir()} == {compiler.file_name(name) for name in (compiler.CPU, best.name)}
    parts = len(compiler.PARTS) + len(best.extra_parts) + 1
    assert caplog.messages[-1] == f"compiling the native kernels ({best.name}): {parts} of {parts}"
    least = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
    assert {int(line) for line in (tmp_path / "priorities").read_text().split()} == {min(least, 19)}


def test_a_compiler_that_fails(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_compiler(tmp_path, "echo out of registers >&2; exit 1")
    compilation = BackgroundCompilation(command(tmp_path))
    with caplog.at_level(logging.INFO, background.__name__), pytest.raises(BuildError, match="out of registers"):
        compilation.wait()
    assert not [message for message in caplog.messages if "registers" in message], "the caller says it"
    compilation.stop()


def test_a_compilation_can_be_stopped(cache: Path, tmp_path: Path) -> None:
    """Its compilers end, too, and the next compilation removes what is left of it."""
    pid = tmp_path / "pid"
    write_compiler(tmp_path, f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600")
    compilation = BackgroundCompilation(command(tmp_path))
    running = int(until(lambda: pid.exists() and pid.read_text()))
    compilation.stop()
    compilation.stop()
    with pytest.raises(BuildError):
        compilation.wait()
    until(lambda: not is_running(running))
    assert [*cache.glob(f"{compiler.BUILDING}*")]
    write_compiler(tmp_path, f'cp {STORED} "$last"')
    BackgroundCompilation(command(tmp_path)).wait()
    assert not [*cache.glob(f"{compiler.BUILDING}*")]


def test_it_ends_with_a_process_that_is_killed(cache: Path, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    write_compiler(tmp_path, f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600")
    code = f"from backend.native.background import *; BackgroundCompilation({command(tmp_path)!r}).wait()"
    parent = subprocess.Popen([sys.executable, "-c", code])
    running = int(until(lambda: pid.exists() and pid.read_text()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not is_running(running))


def test_whether_a_compiler_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [compiler.find(name)[0] for name in (compiler.CPU, compiler.LEVELS[compiler.best_level()].name)]
    assert compiler.is_compiled()
    monkeypatch.setattr(compiler, "INSTALLED", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not compiler.is_compiled()
    folder = compiler.default_cache_dir()
    assert folder
    assert compiler.can_write_cache()
    shutil.copy(found[0], folder)
    assert not compiler.is_compiled()
    shutil.copy(found[1], folder)
    assert compiler.is_compiled()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not compiler.can_write_cache()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
