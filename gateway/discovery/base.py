"""The port of a source of deployments, and what all sources share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from gateway.deployments.instances import Instance

Update = Callable[[Sequence[Instance]], None]


class SourceError(Exception):
    """A source cannot be read, or what it says is invalid. The message says what to do, and has no secrets."""


class InstanceSource(ABC):
    """A source of deployments.

    Callers may rely on this: `follow` calls `update` with the complete list as soon as the source was read, and again
    after each successful read or change. Only servers that are ready and not being shut down are in a list. The names
    of a list are unique, and so are its identities. An empty list means that the source has said so. If it cannot be
    read, `follow` raises `SourceError` and `update` is not called.
    """

    description: str  # of the source, for logs and /ready, as in `file engines.yaml`

    @abstractmethod
    async def follow(self, update: Update) -> None:
        """Follow the source until cancelled. After an error it may be called again, and continues."""


def split_address(text: str) -> tuple[str, int]:
    """Split `host:port`, with brackets around an IPv6 address. Raises `ValueError`."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError("an address is host:port, as in 10.0.0.5:8000")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 address needs brackets, as in [::1]:8000")
    if not host or any(c.isspace() or c in "/?#@\\" for c in host):
        raise ValueError("an address is host:port, as in 10.0.0.5:8000")
    return host, int(port)
