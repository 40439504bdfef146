"""Forked processes are processes like others: environment, folder, output, signals, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.launcher import Launched, Launcher, _can_be_forked

PROGRAM = """
import os, sys, time

print(os.environ["NAME"], os.getcwd(), sys.argv[1:], flush=True)
print("to stderr", file=sys.stderr)
if "wait" in sys.argv:
    time.sleep(600)
sys.exit(int(sys.argv[1]))
"""
Start = Callable[..., Launched]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    made = Launcher(modules=())
    yield made
    made.close()


@pytest.fixture
def start(launcher: Launcher, tmp_path: Path) -> Start:
    (tmp_path / "program.py").write_text(PROGRAM)

    def start(*arguments: str) -> Launched:
        env = {**os.environ, "NAME": "a name", "PYTHONPATH": str(tmp_path)}
        with (tmp_path / "stdout").open("wb") as stdout, (tmp_path / "stderr").open("wb") as stderr:
            return launcher.start(["program", *arguments], stdout, stderr, env, tmp_path)

    return start


def test_a_process_has_its_command_environment_and_folder(start: Start, tmp_path: Path) -> None:
    process = start("3", "more")
    assert process.wait() == process.poll() == 3
    assert (tmp_path / "stdout").read_text() == f"a name {tmp_path} ['3', 'more']\n"
    assert (tmp_path / "stderr").read_text() == "to stderr\n"
    assert process.pid != os.getpid()


def test_a_process_is_ended_by_a_signal(start: Start) -> None:
    process = start("0", "wait")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.kill()  # it has ended, so nothing else that has its pid is killed


def test_a_process_gets_an_open_file_and_the_pid_of_its_parent(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "writing.py").write_text("import os, sys; os.write(int(sys.argv[1]), sys.argv[2].encode())")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    reading, writing = os.pipe()
    with (tmp_path / "out").open("wb") as out:
        process = launcher.start(["writing"], out, out, env, tmp_path, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        parent = int(file.read())  # to the end, so no other process has kept it open
    assert parent not in (os.getpid(), process.pid)
    assert process.wait() == 0


def test_threads_can_wait_for_one_process(start: Start) -> None:
    process = start("0", "wait")
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(process.wait) for _ in range(4)]
        process.kill()
        assert {each.result() for each in waiting} == {-signal.SIGKILL}


def test_processes_outlive_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    launcher = Launcher(modules=())
    env = {**os.environ, "NAME": "a name", "PYTHONPATH": str(tmp_path)}
    with (tmp_path / "out").open("wb") as out:
        process = launcher.start(["program", "0", "wait"], out, out, env, tmp_path)
    launcher.close()
    assert process.poll() is None
    process.terminate()
    assert process.wait() == -signal.SIGTERM


def test_what_is_read_at_the_start_cannot_differ() -> None:
    assert _can_be_forked({**os.environ, "NAME": "a name", "PYTHONPATH": "elsewhere"})
    assert not _can_be_forked({**os.environ, "LD_PRELOAD": "another"})
    assert not _can_be_forked({**os.environ, "HF_HUB_OFFLINE": "1"})
    assert not _can_be_forked({**os.environ, "PYTHONMALLOC": "debug"})
