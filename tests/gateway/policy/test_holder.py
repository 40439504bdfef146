import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.policy import Finding, Policy
from gateway.policy.file import PolicyError, PolicyHolder
from tests.gateway.policy.test_file import MINIMAL


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "policy.yaml"
    write(file)
    return file


def write(file: Path, more: str = "") -> None:
    file.write_text(MINIMAL + more)


def delete(file: Path) -> None:
    file.unlink()


def rename_over(file: Path, text: str) -> None:
    """Replace the file by one of equal size and time, as an editor or a mounted config map may do."""
    before, other = file.stat(), file.with_name("other.yaml")
    other.write_text(text)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)


@asynccontextmanager
async def watching(holder: PolicyHolder) -> Any:
    task = asyncio.create_task(holder.watch(every_seconds=0.01))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not become true")


def test_a_holder_cannot_start_with_an_invalid_policy(path: Path) -> None:
    path.write_text("models: []")
    with pytest.raises(PolicyError):
        PolicyHolder(path)


async def test_a_reload_replaces_the_policy_and_leaves_the_old_one_unchanged(path: Path) -> None:
    holder = PolicyHolder(path)
    before, loaded_ns = holder.current, holder.loaded_ns
    received: list[Policy] = []
    holder.subscribe(received.append)
    write(path, "cache: {ttl: 5s}\n")
    assert await holder.reload()
    assert holder.current.cache.ttl == 5
    assert holder.loaded_ns > loaded_ns
    assert before.cache.ttl == 600
    assert received == [holder.current]


async def test_an_invalid_file_changes_nothing_and_sets_last_error(path: Path) -> None:
    holder = PolicyHolder(path)
    before, loaded_ns = holder.current, holder.loaded_ns
    received: list[Policy] = []
    holder.subscribe(received.append)
    write(path, "cache: {ttl: never}\n")
    assert not await holder.reload()
    assert holder.current is before and holder.loaded_ns == loaded_ns
    error = holder.last_error
    assert error is not None
    assert error.problems[0].line == 7
    assert (holder.reloads_accepted, holder.reloads_refused) == (0, 1)

    write(path)
    assert await holder.reload()
    assert holder.last_error is None
    assert (holder.reloads_accepted, holder.reloads_refused) == (1, 1)
    assert received == []  # an equal policy is not a change


async def test_a_corrected_file_with_equal_content_is_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.policy.file")
    holder = PolicyHolder(path)
    write(path, "cache: {ttl: never}\n")
    assert not await holder.reload()
    write(path)
    assert await holder.reload()
    assert caplog.messages[-1] == f"policy {holder.current.hash} stays in force: the content of the file is unchanged"
    assert len(caplog.messages) == 2


async def test_a_check_can_reject_a_reload(path: Path) -> None:
    def short_cache(policy: Policy) -> Iterator[Finding]:
        if policy.cache.ttl > 600:
            yield ("cache", "ttl"), "too long"

    holder = PolicyHolder(path, checks=[short_cache])
    write(path, "cache: {ttl: 1h}\n")
    assert not await holder.reload()
    assert holder.current.cache.ttl == 600


async def test_a_changed_file_is_reloaded(path: Path) -> None:
    holder = PolicyHolder(path)
    async with watching(holder):
        write(path, "cache: {ttl: 5s}\n")
        await until(lambda: holder.current.cache.ttl == 5)


async def test_a_rename_over_the_file_is_reloaded(path: Path) -> None:
    holder = PolicyHolder(path)
    async with watching(holder):
        rename_over(path, MINIMAL.replace("name: t", "name: u"))
        await until(lambda: "u" in holder.current.tenants_by_name)


async def test_a_deleted_file_is_rejected_once_and_its_return_is_noticed(path: Path) -> None:
    holder = PolicyHolder(path)
    async with watching(holder):
        delete(path)
        await until(lambda: holder.last_error is not None)
        await asyncio.sleep(0.05)  # several polls of the missing file
        assert holder.reloads_refused == 1
        assert holder.current.tenants_by_name
        write(path)
        await until(lambda: holder.last_error is None)


async def test_a_touch_without_a_change_does_not_reload(path: Path) -> None:
    holder = PolicyHolder(path)
    async with watching(holder):
        os.utime(path, ns=(1, 1))
        await until(lambda: holder._stamp[0] == 1)
        write(path, "cache: {ttl: 5s}\n")
        await until(lambda: holder.current.cache.ttl == 5)
    assert holder.reloads_accepted == 1


@pytest.mark.skipif(os.name != "posix", reason="SIGHUP is POSIX")
async def test_sighup_always_reloads_and_the_handler_is_removed_at_the_end(path: Path) -> None:
    holder = PolicyHolder(path)
    async with watching(holder):
        await until(lambda: signal.getsignal(signal.SIGHUP) != signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: holder.reloads_accepted == 1)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
