"""The first start of an engine, with no compiled kernels: it streams at once, and changes to the kernels meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from backend.native import compiler, library
from tests.e2e.processes import DEMO, PATIENCE_SECONDS, ROOT, clean_environment, running, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow(seconds=15)]

READY = r"engine ready on (\S+) model"
QUESTION = {"role": "user", "content": "What is prefix caching?"}


def ask(url: str, **options: object) -> tuple[str, int]:
    """The text of a streamed answer, and the number of its chunks."""
    body = {"model": DEMO, "stream": True, "temperature": 0, "messages": [QUESTION]} | options
    text, chunks = "", 0
    with httpx2.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_SECONDS) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
                text += choices[0]["delta"].get("content") or ""
                chunks += 1
    return text, chunks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The engine's sources without compiled kernels, and a compiler that waits until there is a file `go`.

    It then copies libraries that were compiled before, because to compile them takes a minute.
    """
    if library.load() is None:
        pytest.skip("there is no compiler here")
    backend = tmp_path / "engine" / "backend"
    shutil.copytree(ROOT / "backend", backend, ignore=shutil.ignore_patterns("__pycache__", "compiled", "weights"))
    (backend / "demo_model" / "weights").symlink_to(ROOT / "backend" / "demo_model" / "weights")
    stored = tmp_path / "stored"
    stored.mkdir()
    for name in (compiler.CPU, compiler.LEVELS[compiler.best_level()].name):
        shutil.copy(compiler.find(name)[0], stored)
    fake = tmp_path / "bin" / "c++"
    fake.parent.mkdir()
    fake.write_text(f"""#!/bin/sh
for last; do :; done
case "$last" in
*kernels-cpu-*|*/cpu.o) ;;
*) until [ -e {tmp_path}/go ]; do sleep 0.05; done ;;
esac
case "$last" in
*.so) cp {stored}/"$(basename "$last")" "$last" ;;
*) : > "$last" ;;
esac
""")
    fake.chmod(0o755)
    return tmp_path


def test_the_first_start_streams_while_the_kernels_are_compiled(folder: Path) -> None:
    env = clean_environment(
        PYTHONPATH=str(folder / "engine"),
        XDG_CACHE_HOME=str(folder / "cache"),
        PATH=f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
    )
    # `-P` so that nothing of this repository is found first.
    command = [sys.executable, "-P", "-m", "backend", "--model", "demo", "--port", "0", "--kv-cache-memory-mib", "64"]
    with running(command, folder / "run", READY, env) as engine, ThreadPoolExecutor(2) as clients:
        log, level = engine.log.read_text, compiler.LEVELS[compiler.best_level()].name
        expected, chunks = ask(engine.url)
        assert chunks > 10
        assert "torch computes until the native kernels are compiled" in log()
        until(lambda: "compiling the native kernels" in log())
        assert "are in use" not in log()

        # Two streams at any time, so that some run through the change.
        def stream_until_swapped() -> list[str]:
            texts = []
            while "are in use" not in log():
                texts.append(ask(engine.url)[0])
            return [*texts, ask(engine.url)[0]]

        streams = [clients.submit(stream_until_swapped) for _ in range(2)]
        (folder / "go").touch()
        for stream in streams:
            assert {*stream.result()} == {expected}
        shown = log()
        stages = (
            "torch computes until the native kernels are compiled",
            f"compiling the native kernels ({level}): 3 of",
            "loading the weights for the native kernels",
            "the native kernels are in use",
        )
        assert [shown.count(stage) for stage in stages] == [1, 1, 1, 1], shown
        assert sorted(stages, key=shown.index) == [*stages]
    with running(command, folder / "second", READY, env) as engine:
        assert ask(engine.url)[0] == expected
        assert "kernels" not in engine.log.read_text(), "the cache has them"
