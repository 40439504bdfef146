"""Running the gateway: uvicorn around the application, told of a shutdown before uvicorn waits for open replies."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

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
ADMIN_DRAIN_SECONDS = 5
QUIET: dict[str, Any] = {
    "ws": "none", "log_config": None, "access_log": False, "server_header": False, "date_header": False,
    "proxy_headers": False,
}  # fmt: skip
GC_THRESHOLDS = (10_000, 20, 50)  # requests make next to no cycles; looking for them often costs 5 % of a request


log = logging.getLogger("warmpath")


class Server(uvicorn.Server):
    """uvicorn's server; `on_ready` gets the address once connections are taken."""

    def __init__(
        self,
        config: uvicorn.Config,
        gateway: Gateway,
        on_ready: Callable[[str], None],
        admin: tuple[AdminServer, socket.socket] | None = None,
    ) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._on_ready = on_ready
        self._admin = admin
        self._admin_serving: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # until it runs

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        # What is here now stays: it need not be looked through again and again for garbage that requests make.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        if self.started and sockets:
            if self._admin is not None:
                server, listener = self._admin
                self._admin_serving = asyncio.create_task(server.serve([listener]), name="admin API")
                log.info("the admin API listens on %s", url_of(listener))
            self._on_ready(url_of(sockets[0]))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._admin is not None and self._admin_serving is not None:
            self._admin[0].should_exit = True
            await self._admin_serving
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # A signal comes between any two steps of the program: the loop drains when it is between two of its own.
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._gateway.drain)
        super().handle_exit(sig, frame)


class AdminServer(uvicorn.Server):
    """The second listener: on the same loop, and ended by the first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def run(settings: Settings, *, on_ready: Callable[[str], None], json_logs: bool = True) -> bool:
    """Serve until a signal says stop. False when the start failed. Raises `PolicyError`, `OSError`, `ValueError`."""
    configure_logging(settings.log_level, json=json_logs)
    gateway = Gateway(settings, PolicyHolder(settings.policy, checks=IN_SERVICE))
    config = uvicorn.Config(
        gateway,
        loop="uvloop",
        http=JoinedProtocol,
        lifespan="on",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(settings.drain_seconds),
        backlog=BACKLOG,
        **QUIET,
    )
    for sig in (signal.SIGINT, signal.SIGTERM):
        # uvicorn handles both, and raises them once more when it is done: that must not end us as a crash.
        signal.signal(sig, lambda *_: None)
    with contextlib.ExitStack() as listeners:
        listener = listeners.enter_context(listen(settings.host, settings.port))
        admin = None
        if settings.admin_port is not None:
            admin_config = uvicorn.Config(
                gateway.admin, lifespan="off", timeout_graceful_shutdown=ADMIN_DRAIN_SECONDS, **QUIET
            )
            admin_listener = listeners.enter_context(listen(settings.admin_host, settings.admin_port))
            admin = (AdminServer(admin_config), admin_listener)
        server = Server(config, gateway, on_ready, admin)
        with contextlib.suppress(SystemExit):  # of a start that failed
            server.run(sockets=[listener])
    return server.started


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


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
