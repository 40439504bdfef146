"""Providers send calls to deployments in each server's API. A deployment's `provider` field in the policy selects one.

`base` defines the interface of a provider. `openai` implements the OpenAI-compatible API of most servers, and all other
providers inherit from it. `anthropic/`, `gemini/` and `ollama/` translate to other APIs, on the base of `translation`
and `chat_request`. `transport/` is the HTTP client, and `native_relay/` passes on the texts of its streams. `usage/`
reads token counts, `sse` reads event streams, and `upstream_errors` reads error responses. Begin at `base`, then read
`openai`. This package imports `gateway.types`, `gateway.policy` and `gateway.core`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from gateway.policy import Deployment, Secret
from gateway.providers.adjusted import AdjustedProvider
from gateway.providers.base import Fault, Provider, ProviderFailure, UpstreamResponse
from gateway.providers.transport import HTTPTransport

# a provider's name in the policy -> module:class, imported on first use
PROVIDERS = {
    "anthropic": "gateway.providers.anthropic:Anthropic",
    "azure": "gateway.providers.azure:Azure",
    "gemini": "gateway.providers.gemini:Gemini",
    "ollama": "gateway.providers.ollama:Ollama",
    "openai": "gateway.providers.openai:OpenAI",
    "llamacpp": "gateway.providers.llamacpp:LlamaCpp",
    "sglang": "gateway.providers.sglang:SGLang",
    "trtllm": "gateway.providers.trtllm:TensorRTLLM",
    "vllm": "gateway.providers.vllm:VLLM",
    "warmpath": "gateway.providers.vllm:Warmpath",
}

CACHE_SALT_PROVIDERS = frozenset(
    {"sglang", "vllm", "warmpath"}
)  # providers that isolate the prefix caches of tenants by `cache_salt`
COUNTING_PROVIDERS = frozenset({"vllm", "warmpath"})  # providers with token counters, for reconciliation


class UnknownProvider(ValueError):
    """The policy names a provider that does not exist."""


def make_provider(
    deployment: Deployment, transport: HTTPTransport, resolve_secret: Callable[[Secret], str]
) -> Provider:
    """Create the provider of a deployment. `resolve_secret` returns the deployment's API key, and may raise."""
    if (path := PROVIDERS.get(deployment.provider)) is None:
        known = ", ".join(sorted(PROVIDERS))
        raise UnknownProvider(
            f"deployment {deployment.name!r}: unknown provider {deployment.provider!r}; valid providers: {known}"
        )
    module, _, name = path.partition(":")
    provider: Provider = getattr(importlib.import_module(module), name)(deployment, transport, resolve_secret)
    if deployment.defaults or deployment.overrides or deployment.system_prompt is not None:
        return cast(Provider, AdjustedProvider(provider, deployment))  # it passes on what it does not define
    return provider


__all__ = [
    "CACHE_SALT_PROVIDERS",
    "COUNTING_PROVIDERS",
    "PROVIDERS",
    "Fault",
    "Provider",
    "ProviderFailure",
    "UnknownProvider",
    "UpstreamResponse",
    "make_provider",
]
