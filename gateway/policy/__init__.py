"""The routing policy as frozen models: what is allowed and what is preferred. Where things are is `settings`' part.

A policy is validated whole before it takes effect and is never changed afterwards: a reload makes a new one, and a
call keeps the one it began with. Every field has a description; the JSON Schema and the reference page are made of
them. Unknown keys are errors. Reading files, with line numbers in the messages, is `policy_file`'s part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gateway.policy.batches import Batches
from gateway.policy.deployments import Deployment, Model
from gateway.policy.fields import EnvSecret
from gateway.policy.findings import Finding, Path, choices
from gateway.policy.policy import Policy, PolicyNameError
from gateway.policy.prices import Price
from gateway.policy.responses import Responses
from gateway.policy.tenants import Budget, Key, Limits, PartLimits, Rate, StorageOutage, Tenant, TenantLimits
from gateway.policy.traffic import BUILT_IN_CLASSES, Floor, Hedge, LatencyClass, Match, Rule

Check = Callable[[Policy], Iterable[Finding]]
"""A further judgement on a policy, by a part of the gateway that knows more than its models do."""

__all__ = [
    "BUILT_IN_CLASSES", "Batches", "Budget", "Check", "Deployment", "EnvSecret", "Finding", "Floor", "Hedge", "Key",
    "LatencyClass", "Limits", "Match", "Model", "PartLimits", "Path", "Policy", "PolicyNameError", "Price", "Rate",
    "Responses", "Rule", "StorageOutage", "Tenant", "TenantLimits", "choices",
]  # fmt: skip
