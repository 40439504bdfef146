"""Failover: a deployment that is down costs its callers only time, and receipts list the attempt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.processes import (
    DEMO,
    Gateway,
    Running,
    chat,
    deployment,
    events,
    gateway,
    simple_policy,
    text_of,
)
from tests.ports import free_port

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def fresh_gateway(tmp_path_factory: pytest.TempPathFactory, local_engine: Running) -> Iterator[Gateway]:
    """A gateway whose health checks have not run yet, because a deployment that fails them is tried last.

    Each deployment that is down looks fastest and is tried by one test, because it is deprioritised after a failure.
    """
    nowhere = f"http://127.0.0.1:{free_port()}"
    policy = simple_policy(
        local_engine.url,
        deployments=[
            deployment("local", local_engine.url),
            *(deployment(f"down-{n}", nowhere, prefill_tokens_per_second="1M") for n in range(4)),
        ],
        models=[
            {"name": DEMO, "deployments": ["local"]},
            *({"name": f"fails-over-{n}", "deployments": [f"down-{n}", "local"]} for n in (0, 1)),
            *({"name": f"falls-back-{n}", "deployments": [f"down-{n}"], "fallbacks": [DEMO]} for n in (2, 3)),
        ],
    )
    with gateway(tmp_path_factory.mktemp("failover"), policy) as started:
        yield started


@pytest.mark.parametrize(
    ("model", "stream"),
    [("fails-over-0", True), ("fails-over-1", False), ("falls-back-2", True), ("falls-back-3", False)],
)
def test_another_deployment_answers(fresh_gateway: Gateway, model: str, stream: bool) -> None:
    body = chat("Who answers?", max_tokens=8, stream=stream) | {"model": model}
    reply = fresh_gateway.post("chat/completions", body)
    assert reply.status_code == 200
    assert reply.headers["x-warmpath-deployment"] == "local"
    assert text_of(events(reply.text)) if stream else reply.json()["choices"][0]["message"]["content"]
    receipt = fresh_gateway.receipt(reply.headers["x-request-id"])
    assert (receipt["outcome"], receipt["deployment"], receipt["exact"]) == ("complete", "local", True)
    assert (receipt["model_asked"], receipt["model_served"]) == (model, DEMO)
    tried = [(attempt["deployment"], attempt["outcome"], attempt["status"]) for attempt in receipt["attempts"]]
    assert tried == [(f"down-{model[-1]}", "connect_error", None), ("local", "ok", 200)]
    assert float(receipt["cost"]) > 0, "billed once, for the attempt that worked"
