from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gateway.providers.transport import HTTPTransport
from tests.gateway.providers.conftest import pytest_asyncio_loop_factories  # both event loops here, too


@pytest.fixture
async def transport() -> AsyncIterator[HTTPTransport]:
    async with HTTPTransport() as transport:
        yield transport


__all__ = ["pytest_asyncio_loop_factories", "transport"]
