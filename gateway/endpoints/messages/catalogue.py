"""The models in the words of Anthropic's wire, and whether somebody asks in them: its list is at OpenAI's path."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.types import Scope

from gateway.core.errors import BadRequest
from gateway.endpoints import catalogue
from gateway.policy import Policy
from gateway.types import Principal

VERSION_HEADER = b"anthropic-version"
PAGE = 20  # Anthropic's, where a client does not say how many
MAX_PAGE = 1000


def asked_for_in(scope: Scope) -> bool:
    """Whether the request is of this wire: by its path, or as every client of Anthropic's says it."""
    path: str = scope["path"]
    return path.startswith("/v1/messages") or any(name == VERSION_HEADER for name, _ in scope["headers"])


def listing(policy: Policy, principal: Principal, created: int, query: Mapping[str, str]) -> dict[str, Any]:
    """One page, in the policy's order. Raises `BadRequest`."""
    names = catalogue.names_for(policy, principal)
    limit = _limit(query.get("limit"))
    if "before_id" in query:
        end = _place(names, "before_id", query["before_id"])
        start = max(0, end - limit)
        more = start > 0
    else:
        start = _place(names, "after_id", query["after_id"]) + 1 if "after_id" in query else 0
        end = min(start + limit, len(names))
        more = end < len(names)
    page = [_entry(name, created) for name in names[start:end]]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"data": page, "has_more": more, **ends}


def entry(policy: Policy, principal: Principal, created: int, name: str) -> dict[str, Any]:
    """Raises `ModelNotFound`."""
    return _entry(catalogue.entry(policy, principal, created, name)["id"], created)


def _entry(name: str, created: int) -> dict[str, Any]:
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": at, "lifecycle": "active"}


def _limit(asked: str | None) -> int:
    if asked is None:
        return PAGE
    if not (asked.isascii() and asked.isdigit() and 1 <= int(asked[:9]) <= MAX_PAGE):
        raise BadRequest(f"limit: it must be a number from 1 to {MAX_PAGE}", param="limit")
    return int(asked)


def _place(names: list[str], param: str, name: str) -> int:
    try:
        return names.index(name)
    except ValueError:
        raise BadRequest(f"{param}: there is no such model", param=param) from None
