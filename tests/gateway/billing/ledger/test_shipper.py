"""Shipping through a real Redis: at least once into the stream, exactly once into the collected ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.billing.ledger import Ledger, verify
from gateway.billing.ledger import shipper as shipper_module
from gateway.billing.ledger.collector import CollectionGap, collect
from gateway.billing.ledger.shipper import SegmentOffset, Shipper, rows_after
from tests.gateway.billing.ledger.receipts import a_receipt
from tests.redis_server import RedisServer, own_redis_server

__all__ = ["own_redis_server"]


@pytest.fixture(autouse=True)
def fast_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipper_module, "POLL_SECONDS", 0.01)


@pytest.fixture
def redis(own_redis_server: RedisServer) -> Iterator[RedisServer]:
    yield own_redis_server


@asynccontextmanager
async def shipping(folder: Path, redis: RedisServer, replica: str = "one") -> AsyncIterator[tuple[Ledger, Shipper]]:
    async with Ledger(folder, replica, segment_bytes=4000) as ledger:
        shipper = Shipper(redis.url, ledger, replica)
        running = asyncio.create_task(shipper.run())
        try:
            yield ledger, shipper
        finally:
            running.cancel()
            await asyncio.wait([running])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def segment_bytes(ledger: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(ledger.glob("*/*.jsonl"))]


def streamed(redis: RedisServer) -> int:
    with redis.client() as client:
        return sum(client.xlen(key) for key in client.scan_iter(f"{shipper_module.STREAM_PREFIX}*"))


async def test_the_collected_ledger_is_equal_byte_for_byte(tmp_path: Path, redis: RedisServer) -> None:
    async with shipping(tmp_path / "a", redis) as (ledger, shipper):
        for _ in range(30):
            ledger.append(a_receipt())
        await until(lambda: shipper.rows_shipped == 30)
    ((name, rows),) = collect(redis.url, tmp_path / "all").items()
    assert name.startswith("one.") and rows == 30 and streamed(redis) <= 1
    assert segment_bytes(tmp_path / "all") == segment_bytes(tmp_path / "a")
    assert (verify(tmp_path / "all").rows, verify(tmp_path / "all").broken) == (30, None)
    assert collect(redis.url, tmp_path / "all") == {name: 0}


async def test_a_restart_continues_where_the_stream_ends(tmp_path: Path, redis: RedisServer) -> None:
    for restart in (1, 2, 3):
        async with shipping(tmp_path / "a", redis) as (ledger, shipper):
            for _ in range(10):
                ledger.append(a_receipt())
            await until(lambda: shipper.rows_shipped == 10)
            assert streamed(redis) == 10 * restart
    assert sum(collect(redis.url, tmp_path / "all").values()) == 30
    assert segment_bytes(tmp_path / "all") == segment_bytes(tmp_path / "a")


@pytest.mark.parametrize("loses_data", [False, True])
async def test_shipping_continues_after_redis_was_killed(
    tmp_path: Path, redis: RedisServer, loses_data: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipper_module, "BATCH_ROWS", 5)
    async with shipping(tmp_path / "a", redis) as (ledger, shipper):
        for _ in range(20):
            ledger.append(a_receipt())
        await until(lambda: shipper.rows_shipped >= 10)
        collect(redis.url, tmp_path / "all")
        redis.stop()
        for _ in range(20):
            ledger.append(a_receipt())
        await ledger.durable()
        redis.start()
        if loses_data:
            with redis.client() as client:
                client.flushall()
        await until(lambda: shipper._shipped_to == SegmentOffset(*ledger.durable_end))
    collect(redis.url, tmp_path / "all")
    assert segment_bytes(tmp_path / "all") == segment_bytes(tmp_path / "a")
    assert (verify(tmp_path / "all").rows, verify(tmp_path / "all").broken) == (40, None)


async def test_the_lag_grows_while_redis_is_away_and_ends_with_it(tmp_path: Path) -> None:
    async with Ledger(tmp_path, "one") as ledger:
        shipper = Shipper("redis://127.0.0.1:1", ledger, "one")
        running = asyncio.create_task(shipper.run())
        ledger.append(a_receipt())
        assert ledger.lag_seconds > 0
        await ledger.durable()
        assert ledger.lag_seconds == 0
        before = shipper.lag_seconds
        await asyncio.sleep(0.01)
        assert shipper.lag_seconds > before > 0
        shipper._shipped_to = SegmentOffset(*ledger.durable_end)
        assert shipper.lag_seconds == 0
        running.cancel()
        await asyncio.wait([running])


async def test_two_replicas_and_a_folder_that_was_created_again(tmp_path: Path, redis: RedisServer) -> None:
    """The same replica name with another chain: its rows are not mixed up with those of the first one."""
    for folder, replica in (("a", "one"), ("b", "two"), ("c", "one")):
        async with shipping(tmp_path / folder, redis, replica) as (ledger, shipper):
            for _ in range(3):
                ledger.append(a_receipt())
            await until(lambda: shipper.rows_shipped == 3)
    collected = collect(redis.url, tmp_path / "all")
    assert sorted(name.split(".")[0] for name in collected) == ["one", "one", "two"] and set(collected.values()) == {3}
    assert (verify(tmp_path / "all").rows, verify(tmp_path / "all").broken) == (9, None)


async def test_an_uncollected_stream_is_bounded(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipper_module, "STREAM_ROWS_MAX", 7)
    monkeypatch.setattr(shipper_module, "BATCH_ROWS", 5)
    async with shipping(tmp_path / "a", redis) as (ledger, shipper):
        for _ in range(10):
            ledger.append(a_receipt())
        await until(lambda: shipper.rows_shipped == 5)
        await ledger.durable()
        assert streamed(redis) == 5
        assert not ledger.may_remove_segment(ledger.durable_end[0]), "an unshipped segment may not be removed"
        collect(redis.url, tmp_path / "all")
        await until(lambda: shipper.rows_shipped == 10)
    collect(redis.url, tmp_path / "all")
    assert segment_bytes(tmp_path / "all") == segment_bytes(tmp_path / "a")


async def test_a_killed_collector_collects_the_torn_row_again(tmp_path: Path, redis: RedisServer) -> None:
    async with shipping(tmp_path / "a", redis) as (ledger, shipper):
        for _ in range(4):
            ledger.append(a_receipt())
        await until(lambda: shipper.rows_shipped == 4)
    collect(redis.url, tmp_path / "all", keep=True)
    last = sorted((tmp_path / "all").glob("*/*.jsonl"))[-1]
    last.write_bytes(last.read_bytes()[:-10])
    assert sum(collect(redis.url, tmp_path / "all").values()) == 1
    assert segment_bytes(tmp_path / "all") == segment_bytes(tmp_path / "a")


async def test_rows_that_no_stream_has_any_more_are_named(tmp_path: Path, redis: RedisServer) -> None:
    async with shipping(tmp_path / "a", redis) as (ledger, shipper):
        for _ in range(3):
            ledger.append(a_receipt())
        await until(lambda: shipper.rows_shipped == 3)
    collect(redis.url, tmp_path / "other")
    with pytest.raises(CollectionGap, match="the stream lacks the rows"):
        collect(redis.url, tmp_path / "all")


async def test_only_durable_rows_are_shipped(tmp_path: Path) -> None:
    async with Ledger(tmp_path, "one") as ledger:
        ledger.append(a_receipt())
        await ledger.durable()
        end = SegmentOffset(*ledger.durable_end)
        ledger.append(a_receipt())
        assert [row_end for row_end, _ in rows_after(ledger.folder, SegmentOffset(1, 0), end)] == [end]


async def test_an_unreadable_row_is_shipped_as_it_is(tmp_path: Path, redis: RedisServer) -> None:
    async with Ledger(tmp_path / "a", "one", segment_bytes=1000) as ledger:
        for _ in range(3):
            ledger.append(a_receipt())
    with (tmp_path / "a" / "one" / "0000000001.jsonl").open("ab") as segment:
        segment.write(b"{\n")
    async with shipping(tmp_path / "a", redis) as (_, shipper):
        await until(lambda: shipper.rows_shipped == 4)
    collect(redis.url, tmp_path / "all")
    assert segment_bytes(tmp_path / "all")[:3] == segment_bytes(tmp_path / "a")[:3]
    broken = verify(tmp_path / "all").broken
    assert broken is not None and (broken.file.name, broken.line) == ("0000000001.jsonl", 2)
