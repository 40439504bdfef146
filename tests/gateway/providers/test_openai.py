"""The OpenAI provider removes signed thinking if the model also has a deployment that speaks Anthropic's Messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.providers import make_provider
from gateway.providers.transport import HTTPTransport
from gateway.settings import resolve_secret
from tests.gateway.calls import a_call, a_policy

SIGNED = {"type": "thinking", "thinking": "hm", "signature": "s"}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "a", "reasoning_content": "hm", "thinking_blocks": [SIGNED]},
    {"role": "user", "content": 'of "thinking_blocks"'},
]


def sent(provider: str, **model: Any) -> list[dict[str, Any]]:
    """The messages that deployment `a` receives."""
    deployments = [
        {"name": name, "provider": kind, "base_url": f"http://{name}.invalid/v1", "model": "served"}
        for name, kind in (("a", provider), ("b", "anthropic"))
    ]
    models = [{"name": "m", "deployments": ["a"], **model}, {"name": "other", "deployments": ["b"]}]
    policy = a_policy(deployments=deployments, models=models, canonicalise={"level": "off"})
    call = a_call({"model": "m", "messages": MESSAGES}, policy)
    body = make_provider(policy.deployments[0], HTTPTransport(), resolve_secret).render(call)
    messages: list[dict[str, Any]] = json.loads(body)["messages"]
    return messages


@pytest.mark.parametrize("model", [{"deployments": ["a", "b"]}, {"fallbacks": ["other"]}])
@pytest.mark.parametrize("provider", ["openai", "vllm", "trtllm"])
def test_signed_thinking_of_another_deployment_is_removed(provider: str, model: dict[str, Any]) -> None:
    unsigned = {name: value for name, value in MESSAGES[1].items() if name != "thinking_blocks"}
    assert sent(provider, **model) == [MESSAGES[0], unsigned, MESSAGES[2]]


def test_signed_thinking_stays_if_no_deployment_of_the_model_signs() -> None:
    assert sent("openai") == MESSAGES


def test_signed_thinking_stays_on_a_deployment_that_signs() -> None:
    (_, message, _) = sent("anthropic", deployments=["a", "b"])
    assert message["content"][0] == SIGNED
