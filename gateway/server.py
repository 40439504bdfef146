"""Running the gateway: uvicorn around the application, told of a shutdown before uvicorn waits for open replies."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from gateway.app import Gateway
from gateway.http_protocol import JoinedProtocol
from gateway.policy_checks import IN_SERVICE
from gateway.policy_file import PolicyHolder
from gateway.replies import STALL_SECONDS
from gateway.settings import Settings
from gateway.telemetry import configure_logging

KEEP_ALIVE_SECONDS = 75  # longer than the 60 s after which load balancers and clients give idle connections up
BACKLOG = 2048
GC_THRESHOLDS = (10_000, 20, 50)  # requests make next to no cycles; looking for them often costs 5 % of a request


class Server(uvicorn.Server):
    """uvicorn's server; `on_ready` gets the address once connections are taken."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway, on_ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None  # until it runs

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        # What is here now stays: it need not be looked through again and again for garbage that requests make.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            self._on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # A signal comes between any two steps of the program: the loop drains when it is between two of its own.
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._gateway.drain)
        super().handle_exit(sig, frame)


def run(settings: Settings, *, on_ready: Callable[[str], None], json_logs: bool = True) -> bool:
    """Serve until a signal says stop. False when the start failed. Raises `PolicyError`, `OSError`, `ValueError`."""
    configure_logging(settings.log_level, json=json_logs)
    gateway = Gateway(settings, PolicyHolder(settings.policy, checks=IN_SERVICE))
    config = uvicorn.Config(
        gateway,
        loop="uvloop",
        http=JoinedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(settings.drain_seconds),
        backlog=BACKLOG,
    )
    server = Server(config, gateway, on_ready)
    for sig in (signal.SIGINT, signal.SIGTERM):
        # uvicorn handles both, and raises them once more when it is done: that must not end us as a crash.
        signal.signal(sig, lambda *_: None)
    with listen(settings.host, settings.port) as listener, contextlib.suppress(SystemExit):  # of a start that failed
        server.run(sockets=[listener])
    return server.started


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address; port 0 takes any free one. Raises OSError with the address in its words."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted connections inherit it
            # A client that takes nothing more is dropped by the kernel: closing would first wait to send the rest.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_SECONDS * 1000))
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"can not listen on {host}:{port}: {error.strerror}") from None
    return listener
