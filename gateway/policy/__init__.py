"""The policy: immutable models of the policy file, and the code that reads, checks and reloads the file.

A policy says what is allowed (tenants, keys, limits) and what is preferred (latency classes, rules, routing).
Addresses, paths and secrets are settings, in `gateway/settings.py`. A policy is validated completely before it takes
effect and is never changed afterwards. A reload creates a new `Policy`. Calls that have begun keep the old one.
Unknown keys are errors. Each field has a description, from which the JSON Schema and docs/reference/policy.md are
generated.

Read `policy.py` first, which has the root model. `file.py` reads policy files and reports problems with line numbers.
The package imports only `gateway.core`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gateway.policy.batches import Batches
from gateway.policy.deployments import Deployment, FallbacksWhen, Model, UpstreamTLS
from gateway.policy.fields import Secret
from gateway.policy.findings import Finding, Path, choices
from gateway.policy.idempotency import IdempotencyKeys
from gateway.policy.policy import Policy, PolicyNameError
from gateway.policy.prices import Price
from gateway.policy.responses import Background, Responses
from gateway.policy.sources import DnsSource, KubernetesSource, Source
from gateway.policy.tenants import Budget, Key, Limits, PartLimits, Rate, StorageOutage, Tenant, TenantLimits
from gateway.policy.traffic import BUILT_IN_CLASSES, REALTIME, Floor, Hedge, LatencyClass, Match, Rule

Check = Callable[[Policy], Iterable[Finding]]
"""A further check of a valid policy by another component. The policy passes if the check returns no findings."""

__all__ = [
    "BUILT_IN_CLASSES",
    "REALTIME",
    "Background",
    "Batches",
    "Budget",
    "Check",
    "Deployment",
    "DnsSource",
    "FallbacksWhen",
    "Finding",
    "Floor",
    "Hedge",
    "IdempotencyKeys",
    "Key",
    "KubernetesSource",
    "LatencyClass",
    "Limits",
    "Match",
    "Model",
    "PartLimits",
    "Path",
    "Policy",
    "PolicyNameError",
    "Price",
    "Rate",
    "Responses",
    "Rule",
    "Secret",
    "Source",
    "StorageOutage",
    "Tenant",
    "TenantLimits",
    "UpstreamTLS",
    "choices",
]  # fmt: skip
