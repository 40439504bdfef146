"""TCP ports for tests: free ones, and ones that refuse connections."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

PORTS = range(20_000, 32_000)  # below Linux's ephemeral ports, so that no other process gets one meanwhile


def free_port() -> int:
    """A port for a process that must know it before it starts. Prefer port 0 if the process supports it."""
    for port in random.sample(PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port in a hundred tries")


@contextlib.contextmanager
def refusing_port() -> Iterator[int]:
    """A port that refuses connections. It stays bound, as another process could otherwise get it and answer."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]
