"""`warmpath status`, `trace` and `top` against a real gateway; `top` on a real pseudo-terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.faults.upstreams import Request, listening
from tests.e2e.processes import (
    PATIENCE_SECONDS,
    ROOT,
    Gateway,
    clean_environment,
    gateway,
    tenant,
    warmpath,
)
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ADMIN_KEY = "an-admin-key-of-some-length"
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 9}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with a deployment that answers, and a model whose deployment cannot be reached."""

    async def answers(request: Request) -> None:
        await request.whole(tokens=3)

    with listening({"good": answers}) as upstreams:
        urls = {"good": f"http://127.0.0.1:{upstreams.ports['good']}/v1", "gone": f"http://127.0.0.1:{free_port()}/v1"}
        policy = {
            "deployments": [{"name": name, "base_url": url, "model": "m"} for name, url in urls.items()],
            "models": [{"name": "m", "deployments": ["good"]}, {"name": "broken", "deployments": ["gone"]}],
            "cache": {"scope": "off"},
            "tenants": [tenant("dev"), tenant("other")],
        }
        folder = tmp_path_factory.mktemp("front")
        with gateway(folder, policy, admin_key=ADMIN_KEY, admin_port="0") as started:
            yield started


def test_status(front: Gateway, tmp_path: Path) -> None:
    assert front.post("chat/completions", BODY).status_code == 200
    shown = warmpath("status", "--url", front.admin_url, cwd=tmp_path, admin_key=ADMIN_KEY)
    assert re.search(r"^good +ok +0/\d+ +[1-9]\d* +0 ", shown.stdout, re.MULTILINE), shown
    assert re.search(r"^dev +[1-9]", shown.stdout, re.MULTILINE)
    assert front.post("chat/completions", {**BODY, "model": "broken"}).status_code == 502
    failed = warmpath("status", "--url", front.admin_url, cwd=tmp_path, admin_key=ADMIN_KEY).stdout
    assert re.search(r"^gone .* 0/\d+ +([1-9]) +\1 ", failed, re.MULTILINE), "attempts that failed, and not the calls"
    read = json.loads(warmpath("status", "--json", "--url", front.admin_url, cwd=tmp_path, admin_key=ADMIN_KEY).stdout)
    assert [one["stats"]["name"] for one in read["deployments"]] == ["good", "gone"]


def test_trace(front: Gateway, tmp_path: Path) -> None:
    request_id = front.post("chat/completions", BODY).headers["x-request-id"]
    shown = warmpath("trace", request_id, "--url", front.admin_url, cwd=tmp_path, admin_key=ADMIN_KEY)
    assert shown.returncode == 0, shown
    lines = shown.stdout.splitlines()
    assert lines[0].startswith(request_id) and "status 200  complete" in "  ".join(lines[:2])
    bars = [line for line in lines if "█" in line]
    names = [line.split(" ms")[0].rsplit(maxsplit=1)[0].strip() for line in bars]
    assert names == [
        "authenticate", "canonicalise", "cache.lookup", "admit", "queue", "route", "chat", "good: ok", "settle"
    ]  # fmt: skip
    assert max(map(len, lines[4:])) <= 80, "as wide as a terminal is by default"
    unknown = warmpath("trace", "req_unknown", "--url", front.admin_url, cwd=tmp_path, admin_key=ADMIN_KEY)
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "does not have" in unknown.stderr


def test_errors_are_sentences(front: Gateway, tmp_path: Path) -> None:
    wrong = warmpath("status", "--url", front.admin_url, cwd=tmp_path, admin_key="another-key-of-some-length")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1) and "the admin key is wrong" in wrong.stderr
    gone = warmpath("status", "--url", f"http://127.0.0.1:{free_port()}", cwd=tmp_path, admin_key=ADMIN_KEY)
    assert (gone.returncode, gone.stderr.count("\n")) == (1, 1) and "Connection refused" in gone.stderr
    keyless = warmpath("trace", "req_1", cwd=tmp_path)
    assert keyless.returncode == 2 and "WARMPATH_ADMIN_KEY" in keyless.stderr
    piped = warmpath("top", "--url", front.admin_url, cwd=tmp_path, admin_key=ADMIN_KEY)
    assert piped.returncode == 2 and "needs a terminal" in piped.stderr


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], ours: int) -> None:
        self.process = process
        self._ours = ours
        self._written = ""

    def press(self, keys: bytes) -> None:
        self._written = ""
        os.write(self._ours, keys)

    def until(self, pattern: str) -> None:
        """Waits until what was drawn since the last key contains the pattern. Without colours."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not re.search(pattern, re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", self._written)):
            assert time.monotonic() < end and self.process.poll() is None, self._written
            if select.select([self._ours], [], [], 0.1)[0]:
                self._written += os.read(self._ours, 65536).decode(errors="replace")

    def quit(self) -> int:
        """Presses q, and reads until the end, since a program blocks on a full terminal. Returns the exit code."""
        self.press(b"q")
        end = time.monotonic() + PATIENCE_SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < end, self._written
            if select.select([self._ours], [], [], 0.1)[0]:
                with suppress(OSError):  # EIO: the other end is closed
                    os.read(self._ours, 65536)
        return self.process.returncode


@contextmanager
def terminal(*arguments: str, columns: int = 110, rows: int = 40, **settings: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = clean_environment(TERM="xterm-256color", **{f"WARMPATH_{k.upper()}": v for k, v in settings.items()})
    command = [sys.executable, "-m", "gateway", *arguments]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=ROOT)
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_top_on_a_terminal(front: Gateway) -> None:
    good = front.post("chat/completions", BODY, tenant="other").headers["x-request-id"]
    with terminal("top", "--url", front.admin_url, "--every", "0.2", admin_key=ADMIN_KEY) as top:
        top.until(rf"good +ok +0/[\s\S]+other +[\s\S]+{good}")
        top.press(b"s")
        top.until(r"sort \(requests\)")
        top.press(b"\r")
        top.until(rf"{good}[\s\S]+authenticate[\s\S]+good: ok[\s\S]+escape: back")
        top.press(b"\x1b")
        top.until("DEPLOYMENT +STATE")
        refused = front.post("chat/completions", {**BODY, "model": "broken"}).headers["x-request-id"]
        top.press(b"e")
        top.until(rf"{refused}[\s\S]+e: all")
        later = front.post("chat/completions", {**BODY, "model": "broken"}).headers["x-request-id"]
        top.until(later)
        assert top.quit() == 0


def test_top_says_when_the_gateway_is_gone(tmp_path: Path) -> None:
    with (
        listening({}) as _,
        gateway(
            tmp_path,
            {
                "deployments": [{"name": "gone", "base_url": f"http://127.0.0.1:{free_port()}/v1", "model": "m"}],
                "models": [{"name": "m", "deployments": ["gone"]}],
                "tenants": [tenant("dev")],
            },
            admin_key=ADMIN_KEY,
            admin_port="0",
        ) as front,
        terminal("top", "--url", front.admin_url, "--every", "0.2", admin_key=ADMIN_KEY) as top,
    ):
        top.until("gone")
        front.stop()
        top.until("no gateway's admin API at")
        assert top.quit() == 0
