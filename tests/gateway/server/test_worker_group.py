"""The workers of one machine: their names, their shares, and their metrics as one text."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.server.worker_group import SINGLE_WORKER, WorkerGroup, WorkerIdentity, left_behind, merged, socket_path
from tests.gateway.harness import in_time

ONE = b"""# HELP calls_total Calls, by "how".
# TYPE calls_total counter
calls_total{how="a b{c}"} 1.0
calls_total{how="d"} 2.0
# HELP depth How deep.
# TYPE depth gauge
depth 3.0
"""
TWO = b"""# HELP depth How deep.
# TYPE depth gauge
depth 4.0
# HELP calls_total Calls, by "how".
# TYPE calls_total counter
calls_total{how="d"} 5.0
"""


@pytest.mark.parametrize(("places", "count"), [(64, 3), (7, 7), (8, 1), (5, 2)])
def test_shares_make_up_the_whole(places: int, count: int) -> None:
    shares = [WorkerIdentity(number, count).share_of(places) for number in range(count)]
    assert sum(shares) == places and max(shares) - min(shares) <= 1


def test_nobody_is_left_without_a_place() -> None:
    assert [WorkerIdentity(number, 3).share_of(1) for number in range(3)] == [1, 1, 1]


def test_one_text_has_every_series_of_all_workers_once() -> None:
    families = {family.name: family for family in text_string_to_metric_families(merged({0: ONE, 1: TWO}).decode())}
    calls = {(s.labels["worker"], s.labels["how"]): s.value for s in families["calls"].samples}
    assert calls == {("0", "a b{c}"): 1, ("0", "d"): 2, ("1", "d"): 5}
    assert {s.labels["worker"]: s.value for s in families["depth"].samples} == {"0": 3, "1": 4}
    assert (families["calls"].type, families["calls"].documentation) == ("counter", 'Calls, by "how".')


def test_openmetrics_of_all_workers_end_once() -> None:
    both = merged({0: ONE + b"# EOF\n", 1: TWO + b"# EOF\n"})
    assert both.count(b"# EOF") == 1 and both.endswith(b"\n# EOF\n")
    assert not merged({0: ONE, 1: TWO}).endswith(b"# EOF\n")


def test_a_worker_that_does_not_answer_is_down_and_hides_nobody() -> None:
    families = {family.name: family for family in text_string_to_metric_families(merged({0: None, 1: ONE}).decode())}
    assert {s.labels["worker"]: s.value for s in families["warmpath_worker_up"].samples} == {"0": 0, "1": 1}
    assert [s.labels["worker"] for s in families["depth"].samples] == ["1"]


@asynccontextmanager
async def three_workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerGroup]:
    """The first of them. The third one listens and says nothing."""
    monkeypatch.setattr("gateway.server.worker_group.ANSWER_SECONDS", 0.2)
    with ExitStack() as open_sockets:
        listeners = [open_sockets.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
        for number, listener in enumerate(listeners):
            listener.bind(str(socket_path(folder, number)))
            listener.listen()
        here, there = (
            WorkerGroup(
                WorkerIdentity(number, 3, folder, listener),
                metrics=lambda content_type: TWO,
                calls=lambda wanted: b"<%b>" % wanted,
            )
            for number, listener in enumerate(listeners[:2])
        )
        await here.start()
        await there.start()
        yield here
        await asyncio.gather(here.stop(), there.stop())


async def test_any_worker_tells_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with three_workers(tmp_path, monkeypatch) as here:
        text = await here.metrics(ONE, "text/plain")
    assert b'depth{worker="0"} 3.0' in text and b'depth{worker="1"} 4.0' in text
    assert b'warmpath_worker_up{worker="2"} 0' in text


async def test_any_worker_knows_the_last_calls_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with three_workers(tmp_path, monkeypatch) as here:
        assert await here.calls(b'["a b"]') == {0: b'<["a b"]>', 1: b'<["a b"]>', 2: None}


@pytest.mark.parametrize("question", [b"", b"keys\n", b"metric x\n"])
async def test_what_is_no_question_is_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: bytes
) -> None:
    async with three_workers(tmp_path, monkeypatch):
        reader, writer = await asyncio.open_unix_connection(socket_path(tmp_path, 1))
        writer.write(question)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


async def test_a_question_without_end_is_not_listened_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with three_workers(tmp_path, monkeypatch):
        monkeypatch.setattr("gateway.server.worker_group.ANSWER_SECONDS", 3600)
        reader, writer = await asyncio.open_unix_connection(socket_path(tmp_path, 1))
        writer.write(b"x" * 10_000)
        with suppress(ConnectionError):
            assert await in_time(reader.read()) == b""
        writer.close()


async def test_an_answer_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.server.worker_group.ANSWER_MAX_BYTES", len(TWO) - 1)
    async with three_workers(tmp_path, monkeypatch) as here:
        assert b'warmpath_worker_up{worker="1"} 0' in await here.metrics(ONE, "text/plain")


async def test_who_is_alone_has_no_label() -> None:
    assert (
        await WorkerGroup(SINGLE_WORKER, metrics=lambda content_type: ONE, calls=lambda wanted: b"").metrics(
            ONE, "text/plain"
        )
        == ONE
    )


def test_what_is_left_behind_are_chains_of_workers_that_are_no_more(tmp_path: Path) -> None:
    for name in ("gw", "gw.w0", "gw.w1", "gw.w2", "gw.west", "other"):
        (tmp_path / name).mkdir()
    assert left_behind(tmp_path, "gw", SINGLE_WORKER) == ["gw.w0", "gw.w1", "gw.w2"]
    assert left_behind(tmp_path, "gw", WorkerIdentity(0, 2)) == ["gw", "gw.w2"]
    assert left_behind(tmp_path / "none", "gw", SINGLE_WORKER) == []
