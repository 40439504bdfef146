"""What is wrong with a policy that only the parts of the gateway can tell: checks for `policy_file`."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.policy import Check, Finding, Policy, choices
from gateway.providers import PROVIDERS
from gateway.settings import missing_secrets


def known_providers(policy: Policy) -> Iterator[Finding]:
    for i, deployment in enumerate(policy.deployments):
        if deployment.provider not in PROVIDERS:
            message = f"there is no provider {deployment.provider!r}; {choices(deployment.provider, PROVIDERS)}"
            yield ("deployments", i, "provider"), message


ANYWHERE: tuple[Check, ...] = (known_providers,)
IN_SERVICE: tuple[Check, ...] = (known_providers, missing_secrets)  # where the gateway itself runs

__all__ = ["ANYWHERE", "IN_SERVICE", "known_providers"]
