"""One engine, one gateway and one collector for all tests that do not disturb them. Other tests start their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.processes import DEMO, Gateway, Running, deployment, engine, gateway, simple_policy, tenant
from tests.otlp_collector import Collector, collecting
from tests.ports import free_port
from tests.redis_server import redis_server

__all__ = ["redis_server"]

MAX_NUM_SEQS = 8  # small, so that one call with many choices fills the engine

CLASSES = {  # chosen by the header x-class
    "hasty": {"ttft": "1s", "inter_token": "10s"},
    "impatient": {"ttft": "1m", "inter_token": "1s"},
    "short-queue": {"max_queue": 0},
}


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="session")
def local_engine(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Running]:
    options = ["--max-num-seqs", str(MAX_NUM_SEQS), "--otlp-endpoint", collector.url]
    with engine(tmp_path_factory.mktemp("engine"), *options) as started:
        yield started


@pytest.fixture(scope="session")
def local_gateway(
    tmp_path_factory: pytest.TempPathFactory, local_engine: Running, collector: Collector
) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    storage = f"sqlite:///{folder / 'state.db'}"
    with gateway(folder, _policy(local_engine.url), storage=storage, otlp_endpoint=collector.url) as started:
        yield started


def _policy(url: str) -> dict[str, Any]:
    """All tenants, models and classes that the tests need. No two tests may use up the same limit."""
    unused_url = f"http://127.0.0.1:{free_port()}"
    return simple_policy(
        url,
        deployments=[
            deployment("local", url),
            deployment("one-slot", url, max_concurrency=1),
            deployment("down", unused_url),
            deployment("down-too", unused_url),
        ],
        models=[
            {"name": DEMO, "aliases": ["demo"], "deployments": ["local"]},
            {"name": "one-at-a-time", "deployments": ["one-slot"]},
            {"name": "dead", "deployments": ["down", "down-too"]},
        ],
        classes={
            "hasty": {"ttft": "1s", "inter_token": "10s"},
            "impatient": {"ttft": "1m", "inter_token": "1s"},
            "short-queue": {"max_queue": 0},
        },
        rules=[
            {"match": {"service_tier": "flex"}, "class": "batch"},
            *(
                {"match": {"header": {"x-class": name}}, "class": name}
                for name in ("hasty", "impatient", "short-queue")
            ),
        ],
        tenants=[
            tenant("dev"),
            tenant("crowd"),  # for tests that count all receipts of a tenant
            tenant("single", limits={"concurrency": 1}),
            tenant("narrow", limits={"concurrency": 1}),
            tenant("paced", limits={"requests": "1/2s"}),
            tenant("paced_js", limits={"requests": "1/2s"}),
            tenant("paced_messages", limits={"requests": "1/1h"}),
            tenant("poor", limits={"budget": {"amount": "0.00002", "per": "total"}, "tokens": "1M/1s"}),
            tenant("elsewhere", models=["dead"]),
            {**(guest := tenant("guest")), "keys": [{**guest["keys"][0], "models": ["dead"]}]},
        ],
    )
