"""The shared state of gateways: a family of storage engines behind the ports in `base`.

`open_storage` chooses the engine by the scheme of a URL. `memory` is one process's own, `sqlite` is one file on one
machine, `redis` is shared by gateways on several machines. Begin at `base`. Imports only `gateway.core`.
"""

from __future__ import annotations

from importlib import import_module

from gateway.storage.base import Storage

ENGINES = {
    "memory": "gateway.storage.memory:MemoryStorage",
    "sqlite": "gateway.storage.sqlite:SqliteStorage",
    "redis": "gateway.storage.redis:RedisStorage",
    "rediss": "gateway.storage.redis:RedisStorage",
    "unix": "gateway.storage.redis:RedisStorage",
}


def open_storage(url: str, *, owner: str = "") -> Storage:
    """Make the engine for `memory://`, `sqlite:///path`, `redis://`, `rediss://` or `unix://`. The caller opens it.

    `owner` is this process's name among those on the store, and the same after a restart. When an engine with an owner
    opens, it ends the leases that a killed process of that name has left. Without an owner, leases end by themselves.
    Raises `ValueError` for an unknown scheme or an unusable URL.
    """
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in ENGINES:
        valid = ", ".join(f"{name}://" for name in ENGINES)
        raise ValueError(f"storage URL: unknown scheme in {_without_secrets(url)!r}; valid schemes: {valid}")
    module, _, name = ENGINES[scheme].partition(":")
    engine: Storage = getattr(import_module(module), name)(url, owner=owner)
    return engine


def _without_secrets(url: str) -> str:
    """Only the scheme: the rest may contain a password."""
    scheme, separator, _ = url.partition("://")
    return f"{scheme}{separator}..." if separator else url[:20]
