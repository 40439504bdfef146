"""GET /v1/models and /v1/models/{id}: what this caller may ask for."""

from __future__ import annotations

from typing import Any

from gateway.core.errors import ModelNotFound
from gateway.policy import Policy
from gateway.types import Principal


def listing(policy: Policy, principal: Principal, created: int) -> dict[str, Any]:
    """OpenAI's list of models, aliases included: they are names that clients may send."""
    return {"object": "list", "data": [_entry(name, created) for name in names_for(policy, principal)]}


def names_for(policy: Policy, principal: Principal) -> list[str]:
    return [name for name, model in policy.models_by_name.items() if principal.may_use(model)]


def entry(policy: Policy, principal: Principal, created: int, name: str) -> dict[str, Any]:
    """Raises `ModelNotFound`."""
    model = policy.models_by_name.get(name)
    if model is None or not principal.may_use(model):
        raise ModelNotFound(f"the model {name!r} does not exist or is not yours to use", param="model")
    return _entry(name, created)


def _entry(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "warmpath"}
