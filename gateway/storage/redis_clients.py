"""Clients for a Redis server, a Redis Cluster, or a Redis that Sentinels watch, chosen by the scheme of a URL.

    redis://[user:password@]host:port/db, rediss:// (TLS), unix:///path/to.sock
    redis+cluster://[user:password@]host:port[,host:port...], rediss+cluster://
    redis+sentinel://[user:password@]host:port[,host:port...]/service[/db], rediss+sentinel://

A cluster's client learns from any of the listed nodes which node has which keys, and follows them when they move.
Commands that belong together use keys with one hash tag. A Sentinel client asks the listed Sentinels for the primary,
again whenever a connection fails. User and password are those of the Redis servers. Those of the Sentinels are in the
query: `?sentinel_username=...&sentinel_password=...`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import redis
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.sentinel import Sentinel

DEFAULT_PORTS = {"cluster": 6379, "sentinel": 26379}
SENTINEL_SECONDS = 0.5  # for a Sentinel to answer; then the client tries the next one


# These classes have no type hints.
_AsyncSentinels: Any = Sentinel
_Sentinels: Any = redis.Sentinel
_Node: Any = redis.cluster.ClusterNode


class _WatchedRedis(Redis):
    """A client of the primary that also closes its connections to the Sentinels."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        pool: Any = self.connection_pool
        for each in pool.sentinel_manager.sentinels:
            await each.aclose()


def redis_client(url: str, **options: Any) -> Any:
    """A client of asyncio for a URL. `options` are those of `redis.asyncio.Redis`. Raises `ValueError`.

    The client's pipelines work the same for each kind.
    """
    options = {"protocol": 2, **options}
    scheme, _, kind = urlsplit(url).scheme.partition("+")
    if not kind:
        return Redis.from_url(url, **options)
    given = _options(url, scheme) | options
    hosts = list(_hosts(url, kind))
    if kind == "cluster":
        return RedisCluster(startup_nodes=[ClusterNode(*host) for host in hosts], **given)
    service, database, watchers = _sentinel(url)
    sentinels = _AsyncSentinels(hosts, sentinel_kwargs=watchers)
    return sentinels.master_for(service, redis_class=_WatchedRedis, db=database, **given)


def blocking_redis_client(url: str) -> Any:
    """A client without asyncio, for commands. Raises `ValueError`, and `redis.RedisError` if no node answers."""
    scheme, _, kind = urlsplit(url).scheme.partition("+")
    if not kind:
        return redis.Redis.from_url(url, protocol=2)
    given = _options(url, scheme) | {"protocol": 2}
    hosts = list(_hosts(url, kind))
    if kind == "cluster":
        return redis.RedisCluster(startup_nodes=[_Node(*host) for host in hosts], **given)
    service, database, watchers = _sentinel(url)
    return _Sentinels(hosts, sentinel_kwargs=watchers).master_for(service, db=database, **given)


def _options(url: str, scheme: str) -> dict[str, Any]:
    user, separator, _ = urlsplit(url).netloc.rpartition("@")
    name, _, password = user.partition(":")
    named = {"username": unquote(name) or None, "password": unquote(password) or None} if separator else {}
    return named | ({"ssl": True} if scheme == "rediss" else {})


def _hosts(url: str, kind: str) -> Iterator[tuple[str, int]]:
    for each in urlsplit(url).netloc.rpartition("@")[2].split(","):
        parts = urlsplit(f"//{each}")
        if not parts.hostname:
            raise ValueError(f"the storage URL of a {kind} names no host, or an empty one")
        yield parts.hostname, parts.port or DEFAULT_PORTS[kind]


def _sentinel(url: str) -> tuple[str, int, dict[str, Any]]:
    """The service's name, the number of the database, and the options of the connections to Sentinels."""
    parts = urlsplit(url)
    service, _, database = parts.path.strip("/").partition("/")
    if not service or not (database or "0").isdigit():
        raise ValueError("a Sentinel URL must be redis+sentinel://HOST:PORT,.../SERVICE or .../SERVICE/DATABASE")
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    if unknown := query.keys() - {"sentinel_username", "sentinel_password"}:
        raise ValueError(f"a Sentinel URL has no parameter {', '.join(sorted(unknown))}")
    named = {name.removeprefix("sentinel_"): value for name, value in query.items()}
    return service, int(database or 0), {"socket_timeout": SENTINEL_SECONDS, "protocol": 2, **named}
