"""Where shared state is kept: a family of engines behind the ports in `base`, chosen by the scheme of a URL."""

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
    """The engine for `memory://`, `sqlite:///path`, `redis://`, `rediss://` or `unix://`; to be opened by `open()`.

    `owner` names this process among those that share the store, the same after a restart: what its killed
    predecessor held is free again once it has opened. Without a name, leases run out by themselves.
    ValueError for an unknown scheme or an unusable URL.
    """
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in ENGINES:
        valid = ", ".join(f"{name}://" for name in ENGINES)
        raise ValueError(f"storage URL: the scheme of {_without_secrets(url)!r} is not known; there is: {valid}")
    module, _, name = ENGINES[scheme].partition(":")
    engine: Storage = getattr(import_module(module), name)(url, owner=owner)
    return engine


def _without_secrets(url: str) -> str:
    """Only the scheme: what follows may hold a password."""
    scheme, separator, _ = url.partition("://")
    return f"{scheme}{separator}..." if separator else url[:20]
