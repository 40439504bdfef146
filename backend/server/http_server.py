"""uvicorn, told to announce itself when it is ready and to end within a bounded time when asked to."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75  # longer than clients' and proxies' pools keep an idle connection, so that they close it first
CUT_SECONDS = 5  # for replies that were cut at the end of the drain to send their last frame


class EngineHttpServer(uvicorn.Server):
    """On SIGTERM or SIGINT: no new connections; running replies have `drain_seconds`, then `closing` ends them."""

    def __init__(
        self, app: ASGIApp, closing: asyncio.Future[None], drain_seconds: float, announcement: str, log_level: str
    ) -> None:
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="on",
            log_level=log_level,
            access_log=log_level in ("debug", "trace"),
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(drain_seconds + CUT_SECONDS) + 1,
        )
        super().__init__(config)
        self._closing = closing
        self._drain_seconds = drain_seconds
        self._announcement = announcement

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self._announcement, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._drain_seconds, self._cut)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _cut(self) -> None:
        if not self._closing.done():
            self._closing.set_result(None)


def bind(host: str, port: int) -> socket.socket:
    """Port 0 takes a free one. Raises OSError."""
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
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
