"""Checks of deployments with a `role`: the model of each must have deployments of both roles that fit together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gateway.policy.findings import Finding

if TYPE_CHECKING:
    from gateway.policy.deployments import Deployment, Model
    from gateway.policy.policy import Policy

PREFILL, DECODE = "prefill", "decode"


def check_roles(policy: Policy) -> Iterator[Finding]:
    """Find models that have deployments of only one role, and references that would send calls to prefill deployments.

    Names that do not exist are found elsewhere.
    """
    known = policy.deployments_by_name
    prefill = {name for name, deployment in known.items() if deployment.role == PREFILL}
    for i, model in enumerate(policy.models):
        yield from ((("models", i, "deployments"), message) for message in _role_problems(model, known))
        for name in model.weights or ():
            if name in prefill:
                yield ("models", i, "weights"), f"{name!r} has the role prefill, so it answers no calls"
        if model.mirror is not None and model.mirror.deployment in prefill:
            message = f"{model.mirror.deployment!r} has the role prefill, so it answers no calls"
            yield ("models", i, "mirror", "deployment"), message
    for i, route in enumerate(policy.model_routes):
        if route.deployments and all(name in prefill for name in route.deployments):
            yield ("model_routes", i, "deployments"), "all of them have the role prefill, so none answers calls"


def _role_problems(model: Model, known: dict[str, Deployment]) -> Iterator[str]:
    deployments = [known[name] for name in model.deployments if name in known]
    prefill = [one for one in deployments if one.role == PREFILL]
    decode = [one for one in deployments if one.role == DECODE]
    for found, role, other in ((prefill, PREFILL, DECODE), (decode, DECODE, PREFILL)):
        if found and not (decode if role == PREFILL else prefill):
            yield f"{found[0].name!r} has the role {role}, so {model.name!r} needs a deployment with the role {other}"
    if prefill and decode and len(providers := {one.provider: one.name for one in (*prefill, *decode)}) > 1:
        names = " and ".join(f"{name!r} ({provider})" for provider, name in providers.items())
        yield f"{names} cannot load prompts from each other: the provider of all roles must be the same"
