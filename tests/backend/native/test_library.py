"""Compiling the kernels, and what happens if that fails."""

from __future__ import annotations

import logging
import multiprocessing
import shutil
from pathlib import Path

import pytest

from backend.engine.config import EngineConfig
from backend.native import compiler, library
from backend.native.compiler import BuildError, compile_library

if library.load() is None:
    pytest.skip("there is no compiler here", allow_module_level=True)


LEVEL = compiler.LEVELS[-1].name


def program(folder: Path, script: str) -> str:
    """A program that runs `script` instead of a compiler. It gets the output's path in $last."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\nfor last; do :; done\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def copies(folder: Path, before: str = "") -> str:
    """A fast compiler: its output is a library that was compiled before."""
    library.load()
    return program(folder, f'{before}\ncp {compiler.find(compiler.CPU)[0]} "$last"')


def cache(folder: Path) -> Path:
    folder = folder / "cache"
    folder.mkdir(exist_ok=True)
    return folder


def test_the_parts_of_a_level_are_compiled_once(tmp_path: Path) -> None:
    counter = tmp_path / "count"
    counting = copies(tmp_path, before=f"echo x >> {counter}")
    first = compile_library(LEVEL, cache(tmp_path), (counting,))
    compiled = counter.read_text().count("x")
    assert compiled == 2 + len([*(compiler.SOURCES / "kernels" / "parts").glob("*.cpp")]), "kernels.cpp, parts, linking"
    assert compile_library(LEVEL, cache(tmp_path), (counting,)) == first
    assert counter.read_text().count("x") == compiled
    assert [*cache(tmp_path).iterdir()] == [first], "no other file is left"


def test_every_part_is_counted_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, compiler.__name__):
        compile_library("base", cache(tmp_path), (copies(tmp_path),))
    parts = len(compiler.PARTS) + 1
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        f"{parts} parts",
        *(f"{count} of {parts}" for count in range(1, parts + 1)),
    ]


def test_another_source_gives_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, changed = tmp_path / "native", tmp_path / "changed"
    shutil.copytree(compiler.SOURCES, copied)
    shutil.copytree(compiler.SOURCES, changed)
    (changed / "kernels" / "team.h").write_text("// changed\n", encoding="utf-8")
    before = compiler.file_name(LEVEL)
    monkeypatch.setattr(compiler, "SOURCES", copied)
    assert compiler.file_name(LEVEL) == before
    monkeypatch.setattr(compiler, "SOURCES", changed)
    assert compiler.file_name(LEVEL) != before


def test_two_processes_at_once_compile_once(tmp_path: Path) -> None:
    counter = tmp_path / "count"
    counting = copies(tmp_path, before=f"echo x >> {counter}\nsleep 0.1")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, second = pool.starmap(compile_library, [(compiler.CPU, cache(tmp_path), (counting,))] * 2)
    assert first == second
    assert counter.read_text().count("x") == 2, "compiled and linked by the first process only"


def test_a_file_in_the_cache_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG_CACHE_HOME moves the cache, and a file that cannot be loaded counts as none."""
    found = [compiler.find(name)[0] for name in (compiler.CPU, library.load().level_names[-1])]  # type: ignore[union-attr]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "INSTALLED", tmp_path / "none")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    folder = tmp_path / "warmpath" / "kernels"
    folder.mkdir(parents=True)
    for path in found:
        shutil.copy(path, folder)
    library.load.cache_clear()
    try:
        assert library.load() is not None
    finally:
        library.load.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    shutil.copytree(folder, other := tmp_path / "other" / "warmpath" / "kernels")
    (other / found[0].name).write_bytes(b"not a library")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        compiler.open_library(compiler.CPU)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert compiler.default_cache_dir() == Path.home() / ".cache" / "warmpath" / "kernels"


def test_a_directory_that_cannot_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    first, second = (compiler._writable(tmp_path / "file" / "cache") for _ in range(2))
    assert first.is_dir()
    assert first != second, "a directory that others may have written to is not trusted"


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    failing = program(tmp_path, "echo out of registers >&2; exit 1")
    with pytest.raises(BuildError, match="out of registers"):
        compile_library(LEVEL, cache(tmp_path), (failing,))
    assert not [*cache(tmp_path).iterdir()]


def test_libraries_are_installed_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler is needed for them, and libraries of other sources are removed."""
    library.load()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (tmp_path / "kernels-avx2-of-other-sources.so").touch()
    names = compiler.installable_levels("native")
    made = compiler.install(names, tmp_path)
    assert {*tmp_path.iterdir()} == {*made} == {tmp_path / compiler.file_name(name) for name in names}


def test_without_a_compiler(
    tmp_path: Path, demo_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log, and the engine uses torch."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(compiler, "find", lambda name: [])
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
