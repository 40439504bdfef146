"""GET /v1/models and /v1/models/{id}: lists the models that the caller may use."""

from __future__ import annotations

from typing import Any

from gateway.core.errors import ModelNotFound
from gateway.policy import Policy
from gateway.types import Principal


def list_models(policy: Policy, principal: Principal, created: int) -> dict[str, Any]:
    """Return OpenAI's list object of models. Includes aliases, because clients may send them as model names.

    `created` is in seconds since the epoch.
    """
    return {"object": "list", "data": [_model_json(name, created) for name in model_names(policy, principal)]}


def model_names(policy: Policy, principal: Principal) -> list[str]:
    """Return the names and aliases of the models that the principal may use, in the policy's order."""
    return [name for name, model in policy.models_by_name.items() if principal.may_use(model, name)]


def get_model(policy: Policy, principal: Principal, created: int, name: str) -> dict[str, Any]:
    """Return OpenAI's model object. Raises `ModelNotFound` if the model does not exist or may not be used."""
    model = policy.find_model(name)
    if model is None or not principal.may_use(model, name):
        raise ModelNotFound(f"the model {name!r} does not exist, or your key may not use it", param="model")
    return _model_json(name, created)


def _model_json(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "warmpath"}
