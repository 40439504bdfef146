"""Runs uvicorn with a ready line and a graceful shutdown of limited duration, and binds the listening socket."""

from __future__ import annotations

import asyncio
import gc
import socket

import uvicorn
from starlette.types import ASGIApp

from backend.server.http_protocol import StrictProtocol

BACKLOG = 2048
GC_THRESHOLDS = (10_000, 20, 50)  # requests make hardly any cycles
KEEP_ALIVE_SECONDS = 75  # longer than idle timeouts of clients and proxies, so that they close connections first
CUT_SECONDS = 5  # time after the drain in which interrupted responses can send their error


class EngineHttpServer(uvicorn.Server):
    """uvicorn server that prints a ready line and drains on SIGTERM or SIGINT.

    After the signal, the server accepts no new connections. Responses in progress have `drain_seconds` to complete.
    Then the server sets `closing`, which ends them with an error.
    """

    def __init__(
        self, app: ASGIApp, closing: asyncio.Future[None], drain_seconds: float, announcement: str, log_level: str
    ) -> None:
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=StrictProtocol,
            ws="none",
            lifespan="on",
            log_level=log_level,
            access_log=log_level in ("debug", "trace"),
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            # Then uvicorn cancels what is left, such as responses to clients that do not read.
            timeout_graceful_shutdown=int(drain_seconds + CUT_SECONDS) + 1,
        )
        super().__init__(config)
        self._closing = closing
        self._drain_seconds = drain_seconds
        self._announcement = announcement

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts listening and prints the ready line to stdout."""
        await super().startup(sockets)
        # Objects made at the start live as long as the process. To visit them again would stop a step for 50 to 200 ms.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        if self.started:
            print(self._announcement, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains responses in progress. Sets `closing` after `drain_seconds`."""
        timer = asyncio.get_running_loop().call_later(self._drain_seconds, self._cut)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _cut(self) -> None:
        if not self._closing.done():
            self._closing.set_result(None)


def bind(host: str, port: int) -> socket.socket:
    """Binds a TCP socket. Port 0 takes any free port. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    sock.set_inheritable(True)
    return sock


def url_of(sock: socket.socket) -> str:
    """Returns the http:// URL of a bound socket, with brackets around an IPv6 address."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
