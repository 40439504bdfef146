"""SqliteFile: several processes create one file at the same time."""

from __future__ import annotations

import asyncio
import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path

from gateway.storage.sqlite_file import SqliteFile

FILES, PROCESSES = 60, 4
SCHEMAS = (("CREATE TABLE things (name TEXT)",),)


def _open_all(folder: Path, together: Barrier) -> None:
    async def open_and_close(number: int) -> None:
        file = SqliteFile(folder / f"{number}.db", "test", SCHEMAS, synchronous="NORMAL", busy_seconds=0.25)
        together.wait(timeout=10)
        await file.open()
        await file.close()

    for number in range(FILES):
        asyncio.run(open_and_close(number))


def test_several_processes_can_create_a_file_at_the_same_time(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    together = spawn.Barrier(PROCESSES)
    processes = [spawn.Process(target=_open_all, args=(tmp_path, together)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=30)
    assert [process.exitcode for process in processes] == [0] * PROCESSES
