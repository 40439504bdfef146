"""OpenAI's client for JavaScript, as it comes from npm, through gateway and engine."""

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
def seen(node_project: Path, local_gateway: Gateway) -> dict[str, Any]:
    """What the script saw."""
    command = ["node", "client.mjs", f"{local_gateway.url}/v1", key("dev"), key("paced_js")]
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    ran = subprocess.run(
        command, cwd=node_project, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS, env=env
    )
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout))


def test_streams_say_what_the_whole_answer_says(seen: dict[str, Any]) -> None:
    whole = seen["whole"]
    assert whole["text"]
    assert seen["plain"] == {**whole, "usage": None}
    for streamed in (seen["counted"], seen["final"]):
        assert (streamed["text"], streamed["finish"]) == (whole["text"], whole["finish"])
        assert streamed["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_the_other_endpoints(seen: dict[str, Any]) -> None:
    assert seen["completion"]
    assert seen["responses"] == [seen["whole"]["text"]] * 3
    decoded, floats = seen["embeddings"]
    assert decoded == pytest.approx(floats, rel=1e-5, abs=1e-6)
    assert seen["models"][:2] == [DEMO, "demo"]
    assert seen["model"] == "demo"


def test_errors_have_their_classes(seen: dict[str, Any]) -> None:
    assert {name: (error["kind"], error["status"], error["code"]) for name, error in seen["errors"].items()} == {
        "key": ("AuthenticationError", 401, "invalid_api_key"),
        "model": ("NotFoundError", 404, "model_not_found"),
        "types": ("BadRequestError", 400, None),
        "down": ("InternalServerError", 502, "upstream_error"),
    }
    assert seen["errors"]["types"]["param"] == "max_tokens"
    assert all(error["requestID"] for error in seen["errors"].values())


def test_a_limited_client_waits_as_long_as_it_is_told(seen: dict[str, Any]) -> None:
    assert seen["retried"].count(200) == 2
    assert 429 in seen["retried"]


def test_a_stream_that_is_left(seen: dict[str, Any], local_gateway: Gateway, local_engine: Running) -> None:
    receipt = local_gateway.receipt(seen["abandoned"])
    assert receipt["outcome"] == "client_gone"
    assert receipt["output"] < 1800
    until(lambda: local_engine.metric("vllm:num_requests_running") == 0)
