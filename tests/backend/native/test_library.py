"""Compiling the kernels, and what happens if that fails."""

from __future__ import annotations

import logging
import multiprocessing
import shutil
from pathlib import Path

import pytest

from backend.engine.config import EngineConfig
from backend.native import library
from backend.native.library import BuildError, Library, build

if library.load() is None:
    pytest.skip("there is no compiler here", allow_module_level=True)


def compiler(folder: Path, version: str, script: str) -> str:
    """A program that prints a version, and runs `script` to compile."""
    path = folder / "compiler"
    text = f'#!/bin/sh\nif [ "$1" = --version ]; then echo {version}; exit; fi\n{script}\n'
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def copies(folder: Path, version: str = "1", before: str = "") -> str:
    """A fast compiler: it copies the output of the real one."""
    made = build(library.default_cache_dir())
    return compiler(folder, version, f'{before}\nfor last; do :; done; cp {made} "$last"')


def test_the_kernels_are_compiled_once(tmp_path: Path) -> None:
    counter = tmp_path / "count"
    counting = copies(tmp_path, before=f"echo x >> {counter}")
    first = build(tmp_path / "cache", (counting,))
    assert build(tmp_path / "cache", (counting,)) == first
    assert counter.read_text().count("x") == 1
    assert Library(first).level_names[0] == "base"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.name], "no other file is left"


def test_another_compiler_gives_another_file(tmp_path: Path) -> None:
    names = {build(tmp_path / "cache", (copies(tmp_path, version),)).name for version in ("1", "2")}
    assert len(names) == 2


def test_another_source_gives_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = tmp_path / "native"
    shutil.copytree(library.SOURCE.parent, copied)
    compilers = (copies(tmp_path),)  # compiled from the unchanged source
    monkeypatch.setattr(library, "SOURCE", copied / library.SOURCE.name)
    before = build(tmp_path / "cache", compilers)
    (copied / "kernels" / "team.h").write_text("// changed\n", encoding="utf-8")
    assert build(tmp_path / "cache", compilers) != before


def test_two_processes_at_once(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, second = pool.starmap(build, [(tmp_path / "cache", (copies(tmp_path),))] * 2)
    assert first == second
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.name]
    assert Library(first).level_names


def test_a_directory_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, second = (build(tmp_path / "file" / "cache", (copies(tmp_path),)) for _ in range(2))
    assert first.exists()
    assert first.parent != second.parent, "a directory that others may have written to is not trusted"


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    failing = compiler(tmp_path, "1", "echo out of registers >&2; exit 1")
    with pytest.raises(BuildError, match="out of registers"):
        build(tmp_path / "cache", (failing,))
    assert not [*(tmp_path / "cache").iterdir()]


def test_without_a_compiler(
    tmp_path: Path, demo_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log, and the engine uses torch."""
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    library.load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, library.__name__):
            resolved = EngineConfig(model_dir=demo_dir, num_threads=1).resolve()
            EngineConfig(model_dir=demo_dir, num_threads=1).resolve()
    finally:
        library.load.cache_clear()
    assert (resolved.ops, resolved.attention) == ("reference", "sdpa")
    assert len(caplog.records) == 1
    assert "no C++ compiler" in caplog.text


def test_with_a_compiler(demo_dir: Path) -> None:
    resolved = EngineConfig(model_dir=demo_dir, num_threads=1).resolve()
    assert (resolved.ops, resolved.attention) == ("native", "native")
    plain = EngineConfig(model_dir=demo_dir, num_threads=1, ops="reference", attention="sdpa").resolve()
    assert (plain.ops, plain.attention) == ("reference", "sdpa")


@pytest.fixture
def demo_dir() -> Path:
    return Path(library.__file__).parents[1] / "demo_model" / "weights"
