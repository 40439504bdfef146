"""Storage that gateways share: limits and budgets, API keys, stored responses, the response cache and peer messages.

`base` defines the interfaces that each storage engine implements. `open_storage` selects the engine by the scheme of a
URL. `memory` is for a single process, `sqlite` is one file on one machine, and `redis` is shared by gateways on several
machines. Begin at `base`. This package imports only `gateway.core`.
"""

from __future__ import annotations

from importlib import import_module

from gateway.storage.base import Storage

REDIS_SCHEMES = (
    "redis", "rediss", "unix", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel",
)  # fmt: skip
ENGINES = {
    "memory": "gateway.storage.memory:MemoryStorage",
    "sqlite": "gateway.storage.sqlite:SqliteStorage",
    **dict.fromkeys(REDIS_SCHEMES, "gateway.storage.redis:RedisStorage"),
}


def open_storage(url: str, *, owner: str = "") -> Storage:
    """Create the engine for a storage URL. The caller must await `open()` before the first use.

    The scheme is `memory://`, `sqlite:///path`, or one of Redis, which `redis_clients` describes. `owner` is this
    process's name, unique among the processes on the store and the same after a restart. When an engine with an owner
    opens, it ends the leases that a killed process of the same name has left. Without an owner, such leases end when
    they expire.

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
    """Return only the scheme of a URL, because the rest may contain a password."""
    scheme, separator, _ = url.partition("://")
    return f"{scheme}{separator}..." if separator else url[:20]
