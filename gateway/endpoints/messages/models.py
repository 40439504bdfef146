"""Model objects in Anthropic's format, and detection of the format that a GET /v1/models request expects.

OpenAI and Anthropic both list models at GET /v1/models, so the path alone does not tell which format the client
expects.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.types import Scope

from gateway.core.errors import BadRequest
from gateway.core.numbers import whole_number
from gateway.endpoints import models
from gateway.policy import Policy
from gateway.types import Principal

VERSION_HEADER = b"anthropic-version"
PAGE = 20  # models per page; Anthropic's default
MAX_PAGE = 1000


def is_messages_request(scope: Scope) -> bool:
    """Whether a request uses Anthropic's API. Anthropic's paths and the header `anthropic-version` show it."""
    path: str = scope["path"]
    return path.startswith("/v1/messages") or any(name == VERSION_HEADER for name, _ in scope["headers"])


def list_models(policy: Policy, principal: Principal, created: int, query: Mapping[str, str]) -> dict[str, Any]:
    """Return one page of Anthropic's model list, in the policy's order. Raises `BadRequest` for an invalid query."""
    names = models.model_names(policy, principal)
    limit = _limit(query.get("limit"))
    if "before_id" in query:
        end = _position(names, "before_id", query["before_id"])
        start = max(0, end - limit)
        more = start > 0
    else:
        start = _position(names, "after_id", query["after_id"]) + 1 if "after_id" in query else 0
        end = min(start + limit, len(names))
        more = end < len(names)
    page = [_model_json(name, created) for name in names[start:end]]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"data": page, "has_more": more, **ends}


def get_model(policy: Policy, principal: Principal, created: int, name: str) -> dict[str, Any]:
    """Return Anthropic's model object. Raises `ModelNotFound`."""
    return _model_json(models.get_model(policy, principal, created, name)["id"], created)


def _model_json(name: str, created: int) -> dict[str, Any]:
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": at, "lifecycle": "active"}


def _limit(limit: str | None) -> int:
    return PAGE if limit is None else whole_number(limit, "limit", minimum=1, maximum=MAX_PAGE)


def _position(names: list[str], param: str, name: str) -> int:
    try:
        return names.index(name)
    except ValueError:
        raise BadRequest(f"{param}: this model does not exist", param=param) from None
