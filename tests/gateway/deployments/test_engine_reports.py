"""Reports of engines reach the estimates: KV events and metrics, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from backend.engine.cached_block import ROOT_HASH, CachedBlock, hash_block
from backend.server.kv_events import KVEventPublisher
from gateway.core import supervision
from gateway.deployments import engine_reports as engine_reports
from gateway.deployments.engine_reports import EngineReports
from gateway.deployments.fleet import Fleet
from gateway.deployments.state import DeploymentState
from gateway.policy import Policy, Secret
from gateway.prefix.engine_load import read_engine_load
from gateway.prefix.fingerprint import fingerprint
from gateway.providers.offline import OfflineProvider
from gateway.providers.transport import HTTPTransport
from tests.gateway.calls import a_call, a_policy

WAIT_SECONDS = 20
METRICS = """vllm:num_requests_running{model_name="m"} 3.0
vllm:num_requests_waiting{model_name="m"} 2.0
vllm:kv_cache_usage_perc{model_name="m"} 0.5
vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0
"""


class FixedResponseServer:
    """Answers each request with one body, and keeps the request heads."""

    def __init__(self, body: str, status: str = "200 OK") -> None:
        self.body = body
        self.status = status
        self.heads: list[str] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        except asyncio.IncompleteReadError:  # the test has ended
            writer.close()
            return
        head = f"HTTP/1.1 {self.status}\r\ncontent-length: {len(self.body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + self.body.encode())
        await writer.drain()
        writer.close()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        deployment = await asyncio.start_server(self, "127.0.0.1", 0)
        async with deployment:
            yield f"http://127.0.0.1:{deployment.sockets[0].getsockname()[1]}"


def policy_with(**fields: Any) -> Policy:
    whole = a_policy().model_dump(by_alias=True)
    whole["deployments"][0].update(fields)
    return Policy.model_validate(whole)


@asynccontextmanager
async def reporting(policy: Policy) -> AsyncIterator[tuple[Fleet, DeploymentState]]:
    fleet, transport = Fleet(lambda deployment: OfflineProvider()), HTTPTransport()
    fleet.apply(policy)

    def secret_of(secret: Secret) -> str:
        return f"the value of {secret.env}"

    task = asyncio.create_task(EngineReports(fleet, transport, secret_of).run())
    try:
        yield fleet, next(iter(fleet))
    finally:
        task.cancel()
        await asyncio.wait([task])
        await transport.aclose()
    assert all(deployment.blocks is None for deployment in fleet)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


async def test_load_and_capacity_are_read_from_metrics() -> None:
    web = FixedResponseServer(METRICS)
    async with web.listening() as url:
        policy = policy_with(base_url=f"{url}/v1", metrics=True, api_key={"env": "KEY"})
        async with reporting(policy) as (_, deployment):
            await until(lambda: deployment.estimate.load)
            load = deployment.estimate.load
            assert load is not None
            assert (load.running, load.waiting, load.kv_usage) == (3, 2, 0.5)
            assert deployment.cache.capacity_tokens == 1600
    assert web.heads[0].startswith("GET /metrics HTTP/1.1\r\n")
    assert "authorization: Bearer the value of KEY\r\n" in web.heads[0]


async def test_metrics_of_another_origin_are_read_without_the_key() -> None:
    web = FixedResponseServer(METRICS)
    async with web.listening() as url:
        policy = policy_with(metrics=f"{url}/prometheus/metrics", api_key={"env": "KEY"})
        async with reporting(policy) as (_, deployment):
            await until(lambda: deployment.estimate.load)
    assert web.heads[0].startswith("GET /prometheus/metrics ")
    assert "authorization" not in web.heads[0]


@pytest.mark.parametrize(
    "answer", [FixedResponseServer("oops", "500 Internal Server Error"), FixedResponseServer("no metrics")]
)
async def test_a_deployment_without_metrics_is_polled_again(
    answer: FixedResponseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_reports, "METRICS_SECONDS", 0.01)
    async with answer.listening() as url, reporting(policy_with(base_url=f"{url}/v1", metrics=True)) as (_, deployment):
        await until(lambda: len(answer.heads) >= 3)
        assert deployment.estimate.load is None
        answer.status, answer.body = "200 OK", METRICS
        await until(lambda: deployment.estimate.load)


async def test_an_endless_response_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_reports, "METRICS_SECONDS", 0.01)
    monkeypatch.setattr(engine_reports, "RESPONSE_MAX_BYTES", 1000)
    web = FixedResponseServer(METRICS + "#" * 2000)
    async with web.listening() as url, reporting(policy_with(base_url=f"{url}/v1", metrics=True)) as (_, deployment):
        await until(lambda: len(web.heads) >= 2)
        assert deployment.estimate.load is None


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    made = KVEventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    yield made
    made.close()


async def test_evicted_blocks_leave_the_cache_model(publisher: KVEventPublisher) -> None:
    policy = policy_with(kv_events=publisher.endpoint, kv_events_replay=publisher.replay_endpoint)
    text = b"x" * 1024
    chain = fingerprint([text], 0)
    blocks: list[CachedBlock] = []
    for i in range(16):  # of 16 tokens, with 4 bytes each
        parent = blocks[-1].block_hash if blocks else ROOT_HASH
        tokens = tuple(range(i, i + 16))
        blocks.append(CachedBlock(hash_block(parent, tokens), parent, tokens, "", "call-1"))
        publisher.stored(blocks[-1])
    publisher.end_step()
    async with reporting(policy) as (_, deployment):
        await until(lambda: deployment.blocks is not None and len(deployment.blocks) == 16)
        call = msgspec.structs.replace(a_call(policy=policy), fingerprint=chain, prompt_tokens_estimate=256)
        sent = deployment.send(call, 0.0)
        sent.learn_usage("call-1", 256, 0, 1)
        assert deployment.cache.match(chain) == 4
        publisher.removed(blocks[9].block_hash)
        publisher.end_step()
        await until(lambda: deployment.cache.match(chain) == 2)


async def test_tensorrt_events_are_polled() -> None:
    web = FixedResponseServer(
        '[{"event_id": 1, "data": {"type": "stored", "parent_hash": null, "blocks": [{"block_hash": 5}]}}]'
    )
    async with web.listening() as url, reporting(policy_with(kv_events=url)) as (_, deployment):
        await until(lambda: deployment.blocks is not None and len(deployment.blocks) == 1)
    assert web.heads[0].startswith("POST /kv_cache_events ")


async def test_a_reload_starts_and_stops_reporters(
    publisher: KVEventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_reports, "SYNC_SECONDS", 0.01)
    async with reporting(a_policy()) as (fleet, deployment):
        await asyncio.sleep(0.03)
        assert deployment.blocks is None
        fleet.apply(policy_with(kv_events=publisher.endpoint))
        await until(lambda: deployment.blocks is not None)
        fleet.apply(a_policy())
        await until(lambda: deployment.blocks is None)


VLLM_SIZE = 'vllm:num_requests_running 3\nvllm:cache_config_info{block_size="16",num_gpu_blocks="%s"} 1\n'
SGLANG_SIZE = "sglang:num_running_reqs 3\nsglang:max_total_num_tokens %s\n"


@pytest.mark.parametrize("metrics", [VLLM_SIZE, SGLANG_SIZE])
@pytest.mark.parametrize("capacity", ["NaN", "+Inf", "-5", "1e300", "9" * 5000])
async def test_an_absurd_capacity_is_not_learned(metrics: str, capacity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_reports, "METRICS_SECONDS", 0.01)
    web = FixedResponseServer(metrics % capacity)
    async with web.listening() as url, reporting(policy_with(base_url=f"{url}/v1", metrics=True)) as (_, deployment):
        before = deployment.cache.capacity_tokens
        await until(lambda: deployment.estimate.load)
        assert deployment.cache.capacity_tokens == before


async def test_reading_metrics_is_restarted_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_reports, "METRICS_SECONDS", 0.001)
    monkeypatch.setattr(supervision, "FIRST_PAUSE_SECONDS", 0.001)
    read, failures = read_engine_load, 2

    def failing(text: str) -> Any:
        nonlocal failures
        failures -= 1
        return 1 / 0 if failures >= 0 else read(text)

    monkeypatch.setattr(engine_reports, "read_engine_load", failing)
    async with (
        FixedResponseServer(METRICS).listening() as url,
        reporting(policy_with(base_url=f"{url}/v1", metrics=True)) as (_, deployment),
    ):
        await until(lambda: deployment.estimate.load)
    assert failures < 0
