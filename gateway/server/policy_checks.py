"""What is wrong with a policy that only the parts of the gateway can tell: checks for `policy_file`."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.policy import Check, Finding, Policy, choices
from gateway.providers import CACHE_SALT_PROVIDERS, PROVIDERS
from gateway.settings import missing_secrets


def known_providers(policy: Policy) -> Iterator[Finding]:
    for i, deployment in enumerate(policy.deployments):
        if deployment.provider not in PROVIDERS:
            message = f"there is no provider {deployment.provider!r}; {choices(deployment.provider, PROVIDERS)}"
            yield ("deployments", i, "provider"), message


def shared_caches(policy: Policy) -> Iterator[Finding]:
    """Where tenants could learn of each other's prompts. It may be meant so."""
    if len({tenant.cache_group or ("alone", tenant.name) for tenant in policy.tenants}) > 1:
        for i, deployment in enumerate(policy.deployments):
            if deployment.provider not in CACHE_SALT_PROVIDERS:
                message = "this dialect does not salt all calls: tenants can tell by time and counts what others sent"
                yield ("deployments", i, "provider"), message


ANYWHERE: tuple[Check, ...] = (known_providers,)
IN_SERVICE: tuple[Check, ...] = (known_providers, missing_secrets)  # where the gateway itself runs

__all__ = ["ANYWHERE", "IN_SERVICE", "known_providers", "shared_caches"]
