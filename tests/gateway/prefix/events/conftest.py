"""A listener that records KV events, for the tests of the event sources."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gateway.prefix.events.base import BlocksRemoved, BlocksStored

WAIT_SECONDS = 20


class Recorder:
    """A listener that records events and can be awaited."""

    def __init__(self) -> None:
        self.received: list[object] = []
        self._changed = asyncio.Event()

    def _note(self, what: object) -> None:
        self.received.append(what)
        self._changed.set()

    def stored(self, event: BlocksStored) -> None:
        self._note(event)

    def removed(self, event: BlocksRemoved) -> None:
        self._note(event)

    def cleared(self) -> None:
        self._note("cleared")

    def events_lost(self) -> None:
        self._note("lost")

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not done():
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()
