"""GET /v1/responses/{id}/input_items: lists the input items of a stored response, one page at a time.

Clients may omit some fields when they send an item, but expect all fields when they read it. This module adds the
missing fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.core.errors import BadRequest
from gateway.core.numbers import whole_number
from gateway.endpoints.responses.stored import id_of

Json = dict[str, Any]

PAGE = 20  # OpenAI's default page size
PAGE_MAX = 100
QUERY_PARAMETERS = frozenset({"limit", "order", "after"})


def page_of(items: Sequence[bytes], query: Mapping[str, str], *, owner: str = "response has no input item") -> Json:
    """Return the page of `items` that the query selects, newest first by default. Raises `BadRequest`.

    `owner` is the part of the error's message that says what has no such item."""
    limit = whole_number(query.get("limit", str(PAGE)), "limit", minimum=1, maximum=PAGE_MAX)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest("order: must be asc or desc", param="order")
    listed = list(items)
    if order == "desc":
        listed.reverse()
    if (after := query.get("after")) is not None:
        position = next((number for number, item in enumerate(listed) if id_of(item) == after), None)
        if position is None:
            raise BadRequest(f"after: the {owner} {after[:PAGE_MAX]!r}", param="after")
        listed = listed[position + 1 :]
    return list_of([complete_item(item) for item in listed[:limit]], has_more=len(listed) > limit)


def list_of(page: list[Json], *, has_more: bool) -> Json:
    """Return OpenAI's list object."""
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": has_more,
    }


def complete_item(stored: bytes) -> Json:
    """Add the fields that a client may omit when it sends an item but expects when it reads the item.

    An item of another form passed unchanged to a deployment, and is returned as it is.
    """
    item: Json = msgspec.json.decode(stored)
    try:
        return _completed(item)
    except (KeyError, TypeError, AttributeError):
        return item


def _completed(item: Json) -> Json:
    complete = {name: value for name, value in item.items() if value is not None}
    kind = complete.setdefault("type", "message")
    if kind == "message":
        complete["content"] = _parts(complete["content"], of_model=complete["role"] == "assistant")
    elif kind == "function_call_output" and not isinstance(complete["output"], str):
        complete["output"] = _parts(complete["output"], of_model=False)
    elif kind == "reasoning":
        complete.setdefault("summary", [])
    return {"status": "completed", **complete}


def _parts(content: str | list[Json], *, of_model: bool) -> list[Json]:
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    return [_part({name: value for name, value in part.items() if value is not None}, of_model) for part in parts]


def _part(part: Json, of_model: bool) -> Json:
    if part["type"] == "input_image":
        return {"detail": "auto", **part}
    if of_model and part["type"] in ("input_text", "output_text"):
        return {"annotations": [], "logprobs": [], **part, "type": "output_text"}
    return part
