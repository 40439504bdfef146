from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.policy import Deployment
from gateway.providers import make_provider
from gateway.providers.transport import HTTPTransport
from gateway.types import Operation
from tests.contract.test_providers import call, resolve_nothing

FORGED = b'{"cache_salt": "of another tenant", "priority": -9, "kv_transfer_params": {"remote_host": "x"}}'


def rendered(provider: str, **how: Any) -> dict[str, Any]:
    deployment = Deployment(name="d", provider=provider, base_url="http://x/v1", model="m")
    body = make_provider(deployment, HTTPTransport(), resolve_nothing).render(call(FORGED, **how))
    fields: dict[str, Any] = msgspec.json.decode(body)
    return fields


@pytest.mark.parametrize("operation", [Operation.CHAT, Operation.COMPLETION])
def test_what_each_is_told_beyond_openais_dialect(operation: Operation) -> None:
    vllm = {"model": "m", "cache_salt": "salt-of-the-tenant"}
    assert rendered("vllm", operation=operation) == vllm
    assert rendered("warmpath", operation=operation) == {**vllm, "priority": 10}


def test_embeddings_have_neither() -> None:
    for provider in ("vllm", "warmpath"):
        assert rendered(provider, operation=Operation.EMBEDDING) == {"model": "m"}


def test_a_stream_is_asked_for_usage_at_its_end() -> None:
    for provider in ("vllm", "warmpath"):
        options = rendered(provider, stream=True)["stream_options"]
        assert options == {"include_usage": True}


def test_plain_openai_passes_on_what_it_does_not_know() -> None:
    assert rendered("openai") == {"model": "m", **msgspec.json.decode(FORGED)}
