from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.providers.native_relay.relay import StreamRelay
from tests.gateway.providers.conftest import pytest_asyncio_loop_factories  # runs these tests on both event loops
from tests.gateway.providers.native_relay.streams import Stream, new_relay


@pytest.fixture
async def relay() -> AsyncIterator[StreamRelay]:
    relay = new_relay()
    yield relay
    for stream in Stream.begun:  # uvloop waits for connections that a failed test leaves open
        stream.close()
    Stream.begun.clear()
    await asyncio.sleep(0)
    relay.close()
    assert not relay.streams


__all__ = ["pytest_asyncio_loop_factories", "relay"]
