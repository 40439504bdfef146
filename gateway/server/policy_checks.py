"""Checks of a policy that need to know the providers and the settings, for `gateway.policy.file`."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.auth.openid_provider import ProviderError, load_id_tokens
from gateway.hooks.runner import find_function
from gateway.policy import Check, Finding, Policy, UpstreamTLS, choices
from gateway.providers import CACHE_SALT_PROVIDERS, PROVIDERS
from gateway.providers.transport import UnusableFile, tls_context
from gateway.settings import missing_secrets


def known_providers(policy: Policy) -> Iterator[Finding]:
    """Check that every deployment names a provider that exists."""
    for i, deployment in enumerate(policy.deployments):
        if deployment.provider not in PROVIDERS:
            message = f"there is no provider {deployment.provider!r}; {choices(deployment.provider, PROVIDERS)}"
            yield ("deployments", i, "provider"), message


def shared_caches(policy: Policy) -> Iterator[Finding]:
    """Warn about deployments whose prefix cache does not isolate tenants. A warning, since that may be intended."""
    if len({tenant.cache_group or ("alone", tenant.name) for tenant in policy.tenants}) > 1:
        for i, deployment in enumerate(policy.deployments):
            if deployment.provider not in CACHE_SALT_PROVIDERS:
                message = "this provider does not salt every call, so its prefix cache does not isolate tenants"
                yield ("deployments", i, "provider"), message


def usable_tls_files(policy: Policy) -> Iterator[Finding]:
    """Check that the files for TLS exist and can be used."""
    for i, deployment in enumerate(policy.deployments):
        if deployment.tls is not None:
            try:
                tls_context(deployment.tls)
            except UnusableFile as problem:
                yield ("deployments", i, "tls", problem.field), str(problem)
    if policy.media_fetch.ca is not None:
        try:
            tls_context(UpstreamTLS(ca=policy.media_fetch.ca))
        except UnusableFile as problem:
            yield ("media_fetch", "ca"), str(problem)
    if policy.sign_in is not None and policy.sign_in.ca is not None:
        try:
            tls_context(UpstreamTLS(ca=policy.sign_in.ca))
        except UnusableFile as problem:
            yield ("sign_in", "ca"), str(problem)


def importable_hooks(policy: Policy) -> Iterator[Finding]:
    """Check that the functions of hooks can be imported."""
    for i, hook in enumerate(policy.hooks):
        for field in ("before", "after"):
            if (path := getattr(hook, field)) is not None:
                try:
                    find_function(path)
                except Exception as problem:  # noqa: BLE001 (a module may raise anything)
                    yield ("hooks", i, field), f"{path} cannot be imported: {problem}"


def usable_sign_in(policy: Policy) -> Iterator[Finding]:
    """Check that the package for signing in is installed, if the policy has a provider."""
    if policy.sign_in is not None:
        try:
            load_id_tokens()
        except ProviderError as problem:
            yield ("sign_in",), str(problem)


ANYWHERE: tuple[Check, ...] = (known_providers,)
IN_SERVICE: tuple[Check, ...] = (
    known_providers,
    missing_secrets,
    usable_tls_files,
    importable_hooks,
    usable_sign_in,
)  # also where the gateway runs, so secrets must be set and files must exist

__all__ = [
    "ANYWHERE",
    "IN_SERVICE",
    "importable_hooks",
    "known_providers",
    "shared_caches",
    "usable_sign_in",
    "usable_tls_files",
]
