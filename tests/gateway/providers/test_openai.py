"""What a server that speaks OpenAI's dialect is not sent, where a model has another server that speaks Messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.providers import make_provider
from gateway.providers.transport import HTTPTransport
from gateway.settings import resolve_secret
from tests.gateway.calls import a_call, a_policy

SIGNED = {"type": "thinking", "thinking": "hm", "signature": "s"}
MESSAGES = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "a", "reasoning_content": "hm", "thinking_blocks": [SIGNED]},
    {"role": "user", "content": 'of "thinking_blocks"'},
]


def sent(provider: str, **model: Any) -> list[dict[str, Any]]:
    """What the server `a` gets."""
    servers = [
        {"name": name, "provider": speaks, "base_url": f"http://{name}.invalid/v1", "model": "served"}
        for name, speaks in (("a", provider), ("b", "anthropic"))
    ]
    models = [{"name": "m", "deployments": ["a"], **model}, {"name": "other", "deployments": ["b"]}]
    policy = a_policy(deployments=servers, models=models, canonicalise={"level": "off"})
    call = a_call({"model": "m", "messages": MESSAGES}, policy)
    body = make_provider(policy.deployments[0], HTTPTransport(), resolve_secret).render(call)
    messages: list[dict[str, Any]] = json.loads(body)["messages"]
    return messages


@pytest.mark.parametrize("model", [{"deployments": ["a", "b"]}, {"fallbacks": ["other"]}])
@pytest.mark.parametrize("provider", ["openai", "vllm", "trtllm"])
def test_what_another_server_has_signed_is_taken_out(provider: str, model: dict[str, Any]) -> None:
    unsigned = {name: value for name, value in MESSAGES[1].items() if name != "thinking_blocks"}
    assert sent(provider, **model) == [MESSAGES[0], unsigned, MESSAGES[2]]


def test_it_stays_where_it_is_the_clients_own_affair() -> None:
    assert sent("openai") == MESSAGES


def test_it_stays_where_all_servers_sign() -> None:
    (_, said, _) = sent("anthropic", deployments=["a", "b"])
    assert said["content"][0] == SIGNED
