"""OpenAI's JavaScript client, as published on npm, through gateway and engine."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import DEMO, PATIENCE_SECONDS, Gateway, Running, key, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def results(node_project: Path, local_gateway: Gateway) -> dict[str, Any]:
    """The results of the script."""
    command = ["node", "client.mjs", f"{local_gateway.url}/v1", key("dev"), key("paced_js")]
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    ran = subprocess.run(
        command, cwd=node_project, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS, env=env
    )
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout))


def test_streams_equal_the_json_answer(results: dict[str, Any]) -> None:
    whole = results["whole"]
    assert whole["text"]
    assert results["plain"] == {**whole, "usage": None}
    for streamed in (results["counted"], results["final"]):
        assert (streamed["text"], streamed["finish"]) == (whole["text"], whole["finish"])
        assert streamed["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_other_endpoints_answer(results: dict[str, Any]) -> None:
    assert results["completion"]
    assert results["responses"] == [results["whole"]["text"]] * 3
    decoded, floats = results["embeddings"]
    assert decoded == pytest.approx(floats, rel=1e-5, abs=1e-6)
    assert results["models"][:2] == [DEMO, "demo"]
    assert results["model"] == "demo"


def test_errors_raise_the_client_s_classes(results: dict[str, Any]) -> None:
    assert {name: (error["kind"], error["status"], error["code"]) for name, error in results["errors"].items()} == {
        "key": ("AuthenticationError", 401, "invalid_api_key"),
        "model": ("NotFoundError", 404, "model_not_found"),
        "types": ("BadRequestError", 400, None),
        "down": ("InternalServerError", 502, "upstream_error"),
    }
    assert results["errors"]["types"]["param"] == "max_tokens"
    assert all(error["requestID"] for error in results["errors"].values())


def test_a_rate_limited_client_retries_until_it_succeeds(results: dict[str, Any]) -> None:
    assert results["retried"].count(200) == 2
    assert 429 in results["retried"]


def test_an_abandoned_stream_ends_on_the_engine(
    results: dict[str, Any], local_gateway: Gateway, local_engine: Running
) -> None:
    receipt = local_gateway.receipt(results["abandoned"])
    assert receipt["outcome"] == "client_gone"
    assert receipt["output"] < 1800
    until(lambda: local_engine.metric("vllm:num_requests_running") == 0)
