from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gateway.providers.transport import HTTPTransport
from tests.gateway.providers.conftest import pytest_asyncio_loop_factories  # runs these tests on both event loops


@pytest.fixture
async def transport() -> AsyncIterator[HTTPTransport]:
    async with HTTPTransport() as transport:
        yield transport


__all__ = ["pytest_asyncio_loop_factories", "transport"]
