"""Fixtures of the contract tests: each provider, and each storage engine."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.policy import Deployment
from gateway.providers import PROVIDERS, Provider, make_provider
from gateway.providers.transport import HTTPTransport
from gateway.storage.base import Storage
from gateway.storage.memory import MemoryStorage
from gateway.storage.redis import RedisStorage
from gateway.storage.sqlite import SqliteStorage
from tests.contract.provider_calls import StreamingProvider
from tests.contract.storage_times import PATIENT_SECONDS
from tests.gateway.providers.wires import Wire, wire_of
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]


@pytest.fixture(params=sorted(PROVIDERS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def wire(kind: str) -> Wire:
    return wire_of(kind)


@pytest.fixture
async def transport() -> AsyncIterator[HTTPTransport]:
    async with HTTPTransport() as transport:
        yield transport


@pytest.fixture(params=["anext", "stream_to"])
def reading(request: pytest.FixtureRequest) -> str:
    way: str = request.param
    return way


@pytest.fixture
def provider_for(kind: str, reading: str, transport: HTTPTransport) -> Callable[..., Provider]:
    def make(base_url: str, **settings: Any) -> Provider:
        key = {"env": "KEY_OF_D"}
        deployment = Deployment.model_validate(
            {"name": "d", "provider": kind, "base_url": base_url, "model": "theirs/model", "api_key": key, **settings}
        )
        provider = make_provider(deployment, transport, lambda secret: f"secret-in-{secret.env}")
        return cast(Provider, StreamingProvider(provider)) if reading == "stream_to" else provider

    return make


_tenants = (f"t{number}" for number in itertools.count())  # all tests share one Redis


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def storage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Storage]:
    engine: Storage
    if request.param == "memory":
        engine = MemoryStorage(owner="me", blob_bytes=1000, document_bytes=1000)
    elif request.param == "sqlite":
        engine = SqliteStorage(
            f"sqlite:///{tmp_path / 'state.db'}",
            owner="me",
            blob_bytes=1000,
            document_bytes=1000,
            timeout_seconds=PATIENT_SECONDS,
        )
    else:
        server: RedisServer = request.getfixturevalue("redis_server")
        with server.client() as client:
            client.flushall()
        engine = RedisStorage(
            server.url,
            owner="me",
            blob_bytes=1000,
            document_bytes=1000,
            timeout_seconds=PATIENT_SECONDS,
            clock="caller",
        )
    await engine.open()
    yield engine
    await engine.close()


@pytest.fixture
def tenant() -> str:
    return next(_tenants)
