"""Runs one gateway process: its listeners, its signals, and its graceful shutdown, around uvicorn.

On SIGTERM or SIGINT the gateway first reports not ready for the lame-duck time and still serves, so that load balancers
move away. Then it drains: calls in flight finish within the drain time. A second signal skips to the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Generator, Iterator
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from gateway.core.interpreter import this_is_unoptimised
from gateway.core.supervision import SupervisedTask
from gateway.endpoints.wire import STALL_SECONDS
from gateway.policy.file import PolicyHolder
from gateway.server.app import Gateway
from gateway.server.http_protocol import MAX_CONNECTIONS, Connections, JoinedProtocol
from gateway.server.policy_checks import IN_SERVICE
from gateway.server.worker_group import SINGLE_WORKER, WorkerIdentity
from gateway.settings import Settings
from gateway.telemetry import configure_logging

KEEP_ALIVE_SECONDS = 75  # longer than the 60 s after which load balancers and clients close idle connections
BACKLOG = 2048
ADMIN_DRAIN_SECONDS = 5
ADMIN_MAX_CONNECTIONS = 1000
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
QUIET: dict[str, Any] = {
    "ws": "none", "log_config": None, "access_log": False, "server_header": False, "date_header": False,
    "proxy_headers": False,
}  # fmt: skip
OPEN_FILES = 65_536  # raised to this per process, if the hard limit allows
OTHER_OPEN_FILES = 4096  # reserved for connections to deployments and files; half of all if the limit is low
GC_THRESHOLDS = (10_000, 20, 50)  # requests make hardly any cycles; the default thresholds cost 5 % of a request


log = logging.getLogger("warmpath")


class Server(uvicorn.Server):
    """uvicorn's server with a lame-duck phase and an admin listener. Shuts down if its supervisor process dies.

    `on_ready` gets the address once connections are accepted. During the lame-duck phase, /ready reports 503 and each
    connection closes after its reply, so that load balancers and clients move away before the listener closes.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        gateway: Gateway,
        on_ready: Callable[[str], None],
        connections: Connections,
        *,
        lame_duck_seconds: float = 0.0,
        admin: tuple[AdminServer, socket.socket] | None = None,
        lifeline: int | None = None,
    ) -> None:
        super().__init__(config)
        self.server_state = self._connections = connections
        self._gateway = gateway
        self._on_ready = on_ready
        self._lame_duck_seconds = lame_duck_seconds
        self._admin = admin
        self._admin_serving: SupervisedTask | None = None
        self._lifeline = lifeline  # read end of a pipe that closes when the supervisor process dies
        self._loop: asyncio.AbstractEventLoop | None = None  # until it runs

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        # Objects made at the start live as long as the process: the garbage collector need not visit them again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        if self.should_exit:  # a signal came before the loop ran
            self._gateway.drain()
        if self.started and sockets:
            if self._admin is not None:
                server, listener = self._admin
                listener.listen(BACKLOG)  # the task does so again, but only after `on_ready`
                self._admin_serving = self._gateway.supervisor.start("admin API", partial(server.serve, [listener]))
                log.info("the admin API listens on %s", url_of(listener))
            if self._lifeline is not None:
                self._loop.add_reader(self._lifeline, self._orphaned, self._lifeline)
            self._on_ready(url_of(sockets[0]))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._admin is not None and self._admin_serving is not None:
            self._admin[0].should_exit = True
            await self._admin_serving.join()
        await super().shutdown(sockets)
        if self.force_exit:  # a second Ctrl-C: uvicorn stops waiting, which would lose the last receipts
            for task in list(self.server_state.tasks):
                task.cancel()
            await self.lifespan.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # A signal interrupts the program at any point. The event loop handles it between two of its own steps.
        if self._loop is None or self._loop.is_closed() or self.should_exit:
            super().handle_exit(sig, frame)
        else:
            self._loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        """Handle a signal. The first signal starts the lame-duck phase, and the second one ends it."""
        assert self._loop is not None
        if self._lame_duck_seconds and not self._connections.leaving:
            log.info("shutting down: not ready; still accepting calls for %g s", self._lame_duck_seconds)
            self._connections.leaving = True
            self._gateway.leave()
            self._loop.call_later(self._lame_duck_seconds, self._stop)
        else:
            self._stop()

    def _stop(self) -> None:
        self._gateway.drain()
        self.should_exit = True

    def _orphaned(self, lifeline: int) -> None:
        assert self._loop is not None
        self._loop.remove_reader(lifeline)
        log.error("the supervisor process died; this worker shuts down")
        self._leave()


class AdminServer(uvicorn.Server):
    """The second listener, for the admin API. Runs on the same event loop as the first one, which stops it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.server_state = Connections(ADMIN_MAX_CONNECTIONS)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def run(
    settings: Settings,
    *,
    on_ready: Callable[[str], None],
    json_logs: bool = True,
    worker: WorkerIdentity = SINGLE_WORKER,
    lifeline: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    admin_listener: socket.socket | None = None,
) -> bool:
    """Serve until a signal or the end of `lifeline`. Returns False if the start failed or `should_stop()` is true.

    `should_stop` reports signals that came before the server handled them. `admin_listener` is used for the admin API
    and closed; without it, the settings name the address. Raises `PolicyError`, `OSError`, `ValueError`.
    """
    configure_logging(settings.log_level, json=json_logs)
    open_files = _raise_open_files()
    gateway = Gateway(settings, PolicyHolder(settings.policy, checks=IN_SERVICE), worker)
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
    with contextlib.ExitStack() as listeners:
        listener = listeners.enter_context(listen(settings.host, settings.port, shared=worker.count > 1))
        admin = None
        if settings.admin_port is not None and worker.number == 0:
            admin_config = uvicorn.Config(
                gateway.admin,
                http=JoinedProtocol,
                lifespan="off",
                timeout_graceful_shutdown=ADMIN_DRAIN_SECONDS,
                **QUIET,
            )
            admin_listener = admin_listener or listen(settings.admin_host, settings.admin_port)
            admin = (AdminServer(admin_config), listeners.enter_context(admin_listener))
        connections = Connections(min(MAX_CONNECTIONS, max(open_files // 2, open_files - OTHER_OPEN_FILES)))
        server = Server(
            config, gateway, on_ready, connections,
            lame_duck_seconds=settings.lame_duck_seconds, admin=admin, lifeline=lifeline,
        )  # fmt: skip
        for sig in STOP_SIGNALS:
            # uvicorn handles both only after it has imported its event loop, so an earlier signal would be lost.
            # It also raises the signal again when it is done, which must not end this process as a crash.
            signal.signal(sig, server.handle_exit)
        if should_stop():
            return False
        if worker.number == 0 and this_is_unoptimised():
            log.warning(
                "%s was built without --enable-optimizations: each request costs about a fifth more CPU "
                "(docs/how-to/production.md)", sys.executable,
            )  # fmt: skip
        with contextlib.suppress(SystemExit):  # raised by a failed start
            server.run(sockets=[listener])
        for sig in STOP_SIGNALS:
            signal.signal(sig, lambda *_: None)  # nothing is left to stop
        gc.unfreeze()  # extensions report objects that outlive the interpreter as leaks, on stderr
    return server.started


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGINT or SIGTERM has arrived. For use before `run`.

    KeyboardInterrupt cannot replace this function. It interrupts at any point, for example between starting a child
    process and storing the child's id. It never reaches a process that was started with SIGINT ignored, such as a
    background job of a script.
    """
    told: list[int] = []
    before = {sig: signal.signal(sig, lambda number, _: told.append(number)) for sig in STOP_SIGNALS}
    try:
        yield lambda: bool(told)
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


def _raise_open_files() -> int:
    """Raise the soft limit of open files as far as allowed, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = [limit for limit in (OPEN_FILES, hard) if limit != resource.RLIM_INFINITY]
    if soft != resource.RLIM_INFINITY and soft < min(limits):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits), hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] if soft != resource.RLIM_INFINITY else OPEN_FILES


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a socket bound to the address. Port 0 means any free port. Raises `OSError`, which names the address.

    `shared` sockets can bind the same port (SO_REUSEPORT); the kernel distributes connections between them.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted connections inherit it
            # The kernel drops a client that has stopped reading. Otherwise closing would wait until the rest is sent.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_SECONDS * 1000))
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener
