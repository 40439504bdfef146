"""Whatever the gateway and its commands write can be read by their own user only, whatever the umask was."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import Running, chat, gateway, simple_policy, until, warmpath

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """Processes that the test starts inherit it."""
    before = os.umask(0)
    yield
    os.umask(before)


def readable_by_others(*folders: Path) -> list[str]:
    found = [path for folder in folders for path in (folder, *folder.rglob("*"))]
    return [f"{path} {stat.filemode(path.stat().st_mode)}" for path in found if path.lstat().st_mode & 0o077]


def test_what_the_gateway_writes(tmp_path: Path, local_engine: Running) -> None:
    ledger, storage = tmp_path / "data" / "ledger", tmp_path / "elsewhere" / "state.db"
    for folder in (ledger, storage.parent):
        folder.mkdir(parents=True)
    storage.touch()  # an earlier release has left them readable for all
    with gateway(
        tmp_path, simple_policy(local_engine.url), storage=f"sqlite:///{storage}", admin_port="0",
        admin_key="x" * 32, reconcile_seconds="0.1",
    ) as front, front.client() as client:  # fmt: skip
        assert front.post("chat/completions", chat(max_tokens=2)).status_code == 200
        line = b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n'
        client.files.create(file=("a.jsonl", line), purpose="batch")
        until(front.receipts)
        until(lambda: list(ledger.rglob("engine-counters*")))
        assert readable_by_others(*(tmp_path / "data").iterdir()) == []
        assert readable_by_others(*storage.parent.iterdir()) == []


@pytest.mark.slow
def test_what_the_commands_write(tmp_path: Path, local_engine: Running) -> None:
    with gateway(tmp_path, simple_policy(local_engine.url)) as front:
        assert front.post("chat/completions", chat(max_tokens=2)).status_code == 200
        until(front.receipts)
    data = str(tmp_path / "data")
    out = tmp_path / "usage.csv"
    ran = warmpath("usage", "export", "csv", "--out", str(out), cwd=tmp_path, data_dir=data)
    assert ran.returncode == 0, ran.stderr
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    state = tmp_path / "new" / "keys.db"
    ran = warmpath(
        "keys", "create", "--tenant", "dev", cwd=tmp_path, storage=f"sqlite:///{state}",
        policy=str(tmp_path / "policy.yaml"), data_dir=data,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert readable_by_others(state.parent) == []
