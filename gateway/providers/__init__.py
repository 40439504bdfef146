"""The dialects of deployments: a family of providers behind the port in `base`, chosen by `provider` in the policy.

`openai` is the dialect of most servers and the base of all others. `anthropic/` translates. `transport/` is HTTP,
`usage/` reads token counts, `sse` reads event streams and `upstream_errors` reads error responses. Begin at `base`,
then `openai`. Imports `gateway.types`, `gateway.policy` and `gateway.core`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from gateway.policy import Deployment, EnvSecret
from gateway.providers.base import Fault, Provider, ProviderFailure, UpstreamResponse
from gateway.providers.transport import HTTPTransport

# name in a policy -> module:class, imported on first use
PROVIDERS = {
    "anthropic": "gateway.providers.anthropic:Anthropic",
    "openai": "gateway.providers.openai:OpenAI",
    "llamacpp": "gateway.providers.llamacpp:LlamaCpp",
    "sglang": "gateway.providers.sglang:SGLang",
    "trtllm": "gateway.providers.trtllm:TensorRTLLM",
    "vllm": "gateway.providers.vllm:VLLM",
    "warmpath": "gateway.providers.vllm:Warmpath",
}

CACHE_SALT_PROVIDERS = frozenset(
    {"sglang", "vllm", "warmpath"}
)  # those that keep the prefix caches of tenants apart, by `cache_salt`


class UnknownProvider(ValueError):
    """A policy names a provider that does not exist."""


def make_provider(
    deployment: Deployment, transport: HTTPTransport, resolve_secret: Callable[[EnvSecret], str]
) -> Provider:
    """Make the provider of a deployment. Resolves its API key, once, and raises whatever `resolve_secret` raises."""
    if (path := PROVIDERS.get(deployment.provider)) is None:
        known = ", ".join(sorted(PROVIDERS))
        raise UnknownProvider(
            f"deployment {deployment.name!r}: unknown provider {deployment.provider!r}; valid providers: {known}"
        )
    module, _, name = path.partition(":")
    provider: Provider = getattr(importlib.import_module(module), name)(deployment, transport, resolve_secret)
    return provider


__all__ = [
    "CACHE_SALT_PROVIDERS",
    "PROVIDERS",
    "Fault",
    "Provider",
    "ProviderFailure",
    "UnknownProvider",
    "UpstreamResponse",
    "make_provider",
]
