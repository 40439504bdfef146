"""Two LoRA adapters of one engine as deployments of a gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.backend.lora_writer import save_adapter
from tests.e2e.processes import DEMO, ROOT, Gateway, deployment, engine, gateway, simple_policy, until

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

BLOCK_TOKENS = 16
NAMES = (DEMO, "first", "second")
PROMPT = "The gateway routes each request to the deployment that has most of its prompt cached. " * 20


def send(running: Gateway, model: str) -> tuple[str, dict[str, Any]]:
    """The answer, and the receipt."""
    body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
    reply = running.post("chat/completions", body).raise_for_status()
    return reply.json()["choices"][0]["message"]["content"], running.receipt(reply.headers["x-request-id"])


def test_each_adapter_is_a_model_with_a_cache_of_its_own(tmp_path: Path) -> None:
    """The first request of each model finds nothing, and the second one what events and usage predict."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(ROOT / "backend/demo_model/weights"))
    folders = {name: save_adapter(model, tmp_path / name, seed) for seed, name in enumerate(NAMES[1:])}
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    # In bfloat16, a cached prefix can change the last bits, and these adapters are random: no token is clearly likely.
    options = ["--dtype", "float32", "--kv-events", events, "--kv-events-replay", replay, "--lora-modules"]
    with engine(tmp_path / "engine", *options, *(f"{name}={folder}" for name, folder in folders.items())) as started:
        fields = {"kv_events": events, "kv_events_replay": replay, "metrics": True}
        policy = simple_policy(
            started.url,
            deployments=[deployment(f"on-{name}", started.url, **fields | {"model": name}) for name in NAMES],
            models=[{"name": name, "deployments": [f"on-{name}"]} for name in NAMES],
            cache={"scope": "off"},
        )
        with gateway(tmp_path / "gateway", policy) as running:
            answers = {}
            for name in NAMES:
                answers[name], receipt = send(running, name)
                assert receipt["cache_read"] == receipt["attempts"][-1]["predicted_cached_tokens"] == 0
            assert len({*answers.values()}) == len(NAMES)
            until(lambda: running.metric("warmpath_kv_calls_total", blocks="known") == len(NAMES))
            for name in NAMES:
                answer, receipt = send(running, name)
                assert answer == answers[name]
                assert receipt["cache_read"] > 200
                assert abs(receipt["attempts"][-1]["predicted_cached_tokens"] - receipt["cache_read"]) <= BLOCK_TOKENS
