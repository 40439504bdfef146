from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run each test on asyncio and on uvloop, the gateway's event loop, on which sockets close differently."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
