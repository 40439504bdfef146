"""`warmpath up` as a user runs it: the printed commands work, and Ctrl-C leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import httpx2
import pytest

from tests.e2e.processes import (
    PATIENCE_SECONDS,
    ROOT,
    START_SECONDS_MAX,
    STOP_SECONDS_MAX,
    clean_environment,
    events,
    text_of,
    until,
    warmpath,
)
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KEY = "wp-dev-0123456789abcdef"
IN_BACKGROUND = (
    "sh",
    "-c",
    "trap '' INT; exec \"$@\"",
    "sh",
)  # like a job that a script starts with `&`, which ignores SIGINT


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """The default policy with a free port for the engine, since the default port may be in use."""
    file = tmp_path / "policy.yaml"
    file.write_text((ROOT / "policies/default.yaml").read_text().replace("127.0.0.1:8081", f"127.0.0.1:{free_port()}"))
    return file


@dataclass(frozen=True)
class Up:
    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    @property
    def said(self) -> str:
        return self.out.read_text()

    def children(self) -> list[int]:
        found: list[int] = []
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended meanwhile
                found += map(int, (thread / "children").read_text().split())
        return found

    def interrupt(self) -> int:
        """Ctrl-C: sends SIGINT to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(STOP_SECONDS_MAX)


@contextmanager
def warmpath_up(folder: Path, *options: str, by: Sequence[str] = (), **settings: str) -> Iterator[Up]:
    out, err = folder / "out", folder / "err"
    given = {"admin_port": "0"} | settings
    env = clean_environment(**{f"WARMPATH_{name.upper()}": value for name, value in given.items()})
    command = [*by, sys.executable, "-m", "gateway", "up", *options]
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env, cwd=folder, start_new_session=True)
    try:
        yield Up(process, out, err)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(STOP_SECONDS_MAX)


def is_up(up: Up) -> bool:
    assert up.process.poll() is None, up.err.read_text()
    return "flush=True)" in up.said


def printed(up: Up, name: str) -> str:
    found = re.search(rf"^  {name} +(\S+)$", up.said, re.MULTILINE)
    assert found, up.said
    return found[1]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # a zombie has ended, and its new parent has not reaped it yet


def about_prefix_caching(answer: str) -> bool:
    return "prefix caching reuses the kv cache" in answer.lower()


def test_the_printed_commands_work(tmp_path: Path, policy: Path) -> None:
    with warmpath_up(tmp_path, "--policy", str(policy), "--port", "0", dev_key=KEY) as up:
        until(lambda: is_up(up), patience_seconds=START_SECONDS_MAX)
        assert (printed(up, "key"), printed(up, "model")) == (KEY, "warmpath-demo")
        models = httpx2.get(f"{printed(up, 'base URL')}/models", headers={"authorization": f"Bearer {KEY}"}).json()
        assert [entry["id"] for entry in models["data"]] == ["warmpath-demo", "demo"]

        curl, snippet = up.said[up.said.index("  curl ") :].split("\n\n", 1)
        pasted = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        assert about_prefix_caching(text_of(events(pasted.stdout)))
        command = [sys.executable, "-c", textwrap.dedent(snippet)]
        pasted = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        assert (pasted.returncode, pasted.stderr) == (0, "")
        assert about_prefix_caching(pasted.stdout)
        usage = warmpath("usage", "--csv", cwd=tmp_path)
        assert usage.stdout.splitlines()[1].startswith("2,"), "two requests, in the ledger of this folder"

        (engine,) = up.children()
        assert up.interrupt() == 0
        assert "stopped" in up.said
        assert not alive(engine)
        assert "exit code" not in up.err.read_text(), "the engine, too, ended well"
        assert "Traceback" not in up.err.read_text()


def test_later_starts_use_the_keys_of_the_first(tmp_path: Path, policy: Path) -> None:
    keys, admin_keys = [], []
    for given in ({}, {}, {"admin_key": "of my own/choosing"}):
        with warmpath_up(tmp_path, "--policy", str(policy), "--port", "0", **given) as up:
            until(lambda: is_up(up), patience_seconds=START_SECONDS_MAX)
            keys.append(printed(up, "key"))
            headers = {"authorization": f"Bearer {keys[-1]}"}
            assert httpx2.get(f"{printed(up, 'base URL')}/models", headers=headers).status_code == 200
            url, _, key = printed(up, "dashboard").partition("/#key=")
            admin_keys.append(unquote(key))
            page = httpx2.get(f"{url}/", follow_redirects=True)
            assert (page.url.path, page.headers["content-type"]) == ("/dashboard/", "text/html; charset=utf-8")
            state = httpx2.get(f"{url}/admin/state", headers={"authorization": f"Bearer {admin_keys[-1]}"})
            assert (state.status_code, state.json()["status"]) == (200, "ready")
            assert httpx2.get(f"{url}/admin/state").status_code == 401
            (engine,) = up.children()
            assert up.interrupt() == 0
            assert not alive(engine)
    assert keys[0] == keys[1] == keys[2]
    assert admin_keys[0] == admin_keys[1]
    assert admin_keys[2] == "of my own/choosing"
    for name in ("dev-key", "admin-key"):
        assert (tmp_path / ".warmpath" / name).stat().st_mode & 0o077 == 0


def test_a_configured_dashboard_port_that_is_taken(tmp_path: Path, policy: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = warmpath("up", "--policy", str(policy), "--port", "0", cwd=tmp_path, admin_port=str(port))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.strip() == f"cannot listen on 127.0.0.1:{port}: Address already in use"


@pytest.mark.parametrize("by", [(), IN_BACKGROUND], ids=["foreground", "background"])
def test_an_interrupted_start_leaves_no_engine_behind(tmp_path: Path, policy: Path, by: Sequence[str]) -> None:
    with warmpath_up(tmp_path, "--policy", str(policy), "--port", "0", by=by) as up:
        engines = until(up.children, pause_seconds=0)  # interrupt it while the engine is starting
        assert up.interrupt() == 0
        assert not any(map(alive, engines))
        assert "stopped" in up.said
        assert up.err.read_text() == ""


def test_kill_leaves_no_engine_behind(tmp_path: Path, policy: Path) -> None:
    with warmpath_up(tmp_path, "--policy", str(policy), "--port", "0") as up:
        until(lambda: is_up(up), patience_seconds=START_SECONDS_MAX)
        (engine,) = up.children()
        up.process.kill()
        until(lambda: not alive(engine))


def test_a_crashed_engine_is_restarted(tmp_path: Path, policy: Path) -> None:
    with warmpath_up(tmp_path, "--policy", str(policy), "--port", "0", dev_key=KEY) as up:
        until(lambda: is_up(up), patience_seconds=START_SECONDS_MAX)
        base, headers = printed(up, "base URL"), {"authorization": f"Bearer {KEY}"}
        body = {"model": "warmpath-demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1500}
        (first,) = up.children()
        with httpx2.stream(
            "POST", f"{base}/chat/completions", json=body | {"stream": True, "ignore_eos": True}, headers=headers,
            timeout=PATIENCE_SECONDS,
        ) as reply:  # fmt: skip
            lines = reply.iter_lines()
            next(lines)
            os.kill(first, signal.SIGKILL)
            rest = list(lines)
        assert '"code":"upstream_cut"' in "".join(rest) and "data: [DONE]" not in rest
        answered = until(
            lambda: (
                (reply := httpx2.post(f"{base}/chat/completions", json=body, headers=headers, timeout=PATIENCE_SECONDS))
                and reply.status_code == 200
                and reply
            )
        )
        assert answered.json()["choices"][0]["message"]["content"]
        assert first not in up.children() and "exit code -9" in up.err.read_text()
        assert up.interrupt() == 0


def test_a_port_that_is_taken(tmp_path: Path, policy: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for verb in ("up", "serve"):
            ended = warmpath(verb, "--policy", str(policy), "--port", str(port), cwd=tmp_path)
            assert ended.returncode == 2
            assert ended.stderr.strip() == f"cannot listen on 127.0.0.1:{port}: Address already in use"


def test_an_engine_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file = tmp_path / "policy.yaml"
        file.write_text((ROOT / "policies/default.yaml").read_text().replace("127.0.0.1:8081", f"127.0.0.1:{port}"))
        ended = warmpath("up", "--policy", str(file), "--port", "0", cwd=tmp_path, admin_port="0")
    assert ended.returncode == 2
    assert f"port {port} of the engine is taken" in ended.stderr
    assert ended.stderr.strip().endswith("which is free")
    assert "Traceback" not in ended.stderr
