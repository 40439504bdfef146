"""A real redis-server for tests, on a Unix socket in a temporary folder, so that it needs no port."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.ports import free_port

START_SECONDS = 20.0


class RedisServer:
    """A redis-server that tests can stop, restart, freeze and thaw. Its data survives a restart only if `durable`."""

    def __init__(self, folder: Path, *, durable: bool = False, cluster: bool = False) -> None:
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._command = [
            "redis-server", "--port", "0", "--unixsocket", str(self.socket), "--dir", str(folder), "--save", "",
            "--appendonly", "yes" if durable else "no", "--loglevel", "warning", "--logfile", str(folder / "redis.log"),
            *(["--cluster-enabled", "yes", "--bind", "127.0.0.1", *_ports_of_a_cluster()] if cluster else []),
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.RedisError:  # not listening yet, or still loading its data
                time.sleep(0.01)
        raise RuntimeError("redis-server did not start: see its log beside the socket")

    def stop(self) -> None:
        """Kill the server by SIGKILL, as in a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self.socket.unlink(missing_ok=True)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        """A plain client, with which tests inspect the stored keys."""
        return redis.Redis(unix_socket_path=str(self.socket))


def _ports_of_a_cluster() -> list[str]:
    """Ports for a cluster node, which Redis requires. No client connects to them."""
    return ["--port", str(free_port()), "--cluster-port", str(free_port())]


def start_redis(*, durable: bool = False, cluster: bool = False) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.fail("redis-server is missing: run scripts/ensure-redis.sh")
    with tempfile.TemporaryDirectory(prefix="wp") as folder:  # the path of a socket has at most 107 bytes
        server = RedisServer(Path(folder), durable=durable, cluster=cluster)
        try:
            server.start()
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One server for all tests that neither stop nor freeze it. Each test uses its own tenants."""
    yield from start_redis()


@pytest.fixture
def own_redis_server() -> Iterator[RedisServer]:
    """A durable server for one test, which may stop or freeze it."""
    yield from start_redis(durable=True)
