from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Sockets end in ways of their own on uvloop, which the gateway runs on; and not everybody who tests it does."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
