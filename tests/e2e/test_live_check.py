"""`warmpath check --live` beside a real engine that publishes KV events, and that it finds by discovery."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from tests.e2e.processes import DEMO, deployment, engine, tenant, warmpath
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow(seconds=8)]


def test_it_says_what_works_at_each_deployment(tmp_path: Path) -> None:
    events = f"tcp://127.0.0.1:{free_port()}"
    with engine(tmp_path / "engine", "--kv-events", events) as started:
        (tmp_path / "engines.yaml").write_text(
            yaml.safe_dump([{"targets": [started.url.removeprefix("http://")], "labels": {"name": "one"}}])
        )
        deployments = [
            deployment("local", started.url, kv_events=events),
            deployment("as-vllm", started.url, provider="vllm"),
            {"name": "pods", "provider": "warmpath", "source": {"file": str(tmp_path / "engines.yaml")}},
            {"name": "none", "provider": "warmpath", "source": {"file": str(tmp_path / "missing.yaml")}},
        ]
        policy = {
            "deployments": deployments,
            "models": [{"name": DEMO, "deployments": [each["name"] for each in deployments]}],
            "tenants": [tenant("dev")],
        }
        (tmp_path / "policy.yaml").write_text(yaml.safe_dump(policy))
        ran = warmpath("check", "policy.yaml", "--live", "--json", cwd=tmp_path)
    assert ran.returncode == 1, ran.stderr
    shown = json.loads(ran.stdout)
    assert shown["unusable"] == {"none": "cannot be read: No such file or directory"}
    local, vllm, found = (shown["live"][name] for name in ("local", "as-vllm", "pods/one"))
    assert {local["usage"], vllm["usage"], found["usage"]} == {"reported"}
    assert local["cached_tokens"].startswith("reported (") and local["cache_salt"] == "isolates tenants"
    assert local["kv_events"].startswith("received (") and vllm["kv_events"] == "-"
    assert local["priority"] == "sent and accepted"
    assert vllm["priority"] == "accepted, but not sent: set priorities: true"


def test_it_says_whether_prompts_are_handed_over(tmp_path: Path) -> None:
    """One decode engine loads from the prefill engine, and another one was started without the option."""
    with ExitStack() as stack:
        prefill, decode, plain = (
            stack.enter_context(engine(tmp_path / name, *options))
            for name, options in {"p": ("--kv-transfer",), "d": ("--kv-transfer-peers", "127.0.0.1"), "e": ()}.items()
        )
        deployments = [
            deployment("p", prefill.url, role="prefill"),
            deployment("d", decode.url, role="decode"),
            deployment("e", plain.url, role="decode"),
        ]
        policy = {
            "deployments": deployments,
            "models": [{"name": DEMO, "deployments": ["p", "d", "e"]}],
            "tenants": [tenant("dev")],
        }
        (tmp_path / "policy.yaml").write_text(yaml.safe_dump(policy))
        ran = warmpath("check", "policy.yaml", "--live", "--json", cwd=tmp_path)
        printed = warmpath("check", "policy.yaml", "--live", cwd=tmp_path).stdout
    assert ran.returncode == 0, ran.stderr
    found = {name: each["role"] for name, each in json.loads(ran.stdout)["live"].items()}
    assert found["p"] == "hands prompts over"
    assert found["d"].startswith("loads prompts from p (")
    assert found["e"].startswith("failed: ")
    assert "ROLE" in printed
