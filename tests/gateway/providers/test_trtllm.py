"""TensorRT-LLM: which fields trtllm-serve gets, and which are removed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.policy import Deployment
from gateway.providers import make_provider
from gateway.providers.transport import HTTPTransport
from gateway.providers.trtllm import priority_fraction
from gateway.types import Operation
from tests.contract.provider_calls import call, resolve_nothing

FORGED = {
    "cache_salt": "of another tenant", "priority": 1.0, "lora_request": {"lora_path": "/etc"},
    "disaggregated_params": {"ctx_info_endpoint": "http://x"}, "conversation_params": {},
    "prompt_token_ids_b64": "AA==", "injected_chat_template_kwargs": ["x"],
}  # fmt: skip
GATEWAY_FIELDS = {"service_tier": "flex", "metadata": {"a": "b"}, "safety_identifier": "u", "prompt_cache_key": "k"}


def rendered(fields: dict[str, Any], deployment: dict[str, Any] | None = None, **how: Any) -> dict[str, Any]:
    named = {"name": "d", "provider": "trtllm", "base_url": "http://x/v1", "model": "m", **(deployment or {})}
    provider = make_provider(Deployment.model_validate(named), HTTPTransport(), resolve_nothing)
    body: dict[str, Any] = json.loads(provider.render(call(json.dumps(fields).encode(), **how)))
    return body


@pytest.mark.parametrize(
    ("operation", "salt"),
    [(Operation.CHAT, {"cache_salt": "salt-of-the-tenant"}), (Operation.COMPLETION, {}), (Operation.EMBEDDING, {})],
)
def test_reserved_fields_and_fields_for_the_gateway_are_removed(operation: Operation, salt: dict[str, str]) -> None:
    assert rendered({**FORGED, **GATEWAY_FIELDS, "user": "u"}, operation=operation) == {
        "model": "m",
        "user": "u",
        **salt,
    }


def test_usage_in_every_chunk_is_switched_off_unless_the_policy_enables_it() -> None:
    assert rendered({}, stream=True)["stream_options"] == {"include_usage": True, "continuous_usage_stats": False}
    options = rendered({}, {"continuous_usage": True}, stream=True)["stream_options"]
    assert options == {"include_usage": True, "continuous_usage_stats": True}


def test_the_lowest_priority_becomes_the_highest_fraction() -> None:
    fractions = [priority_fraction(priority) for priority in (-1000, -1, 0, 1, 10, 1000)]
    assert fractions == sorted(fractions, reverse=True)
    assert all(0 < fraction < 1 for fraction in fractions)
    assert priority_fraction(0) == 0.5
    assert rendered(FORGED, {"priorities": True})["priority"] == priority_fraction(10)
