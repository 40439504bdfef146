"""The input items of a kept response, as OpenAI lists them: a page at a time, each with all that its kind has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.core.errors import BadRequest

Json = dict[str, Any]

PAGE = 20  # OpenAI's numbers
PAGE_MAX = 100
KNOWN = frozenset({"limit", "order", "after"})


def page_of(items: Sequence[bytes], wanted: Mapping[str, str]) -> Json:
    """What a query asks for. Raises `BadRequest`."""
    limit = _limit(wanted.get("limit", str(PAGE)))
    order = wanted.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest("order: it must be asc or desc", param="order")
    listed: list[Json] = [msgspec.json.decode(item) for item in items]
    if order == "desc":
        listed.reverse()
    if (after := wanted.get("after")) is not None:
        places = [place for place, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise BadRequest(f"after: the response has no input item {after[:PAGE_MAX]!r}", param="after")
        listed = listed[places[0] + 1 :]
    page = [_whole(item) for item in listed[:limit]]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(listed) > limit,
    }


def _limit(text: str) -> int:
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not 1 <= limit <= PAGE_MAX:
        raise BadRequest(f"limit: it must be a number from 1 to {PAGE_MAX}", param="limit")
    return limit


def _whole(item: Json) -> Json:
    """With what a client may leave out when it sends an item, and expects when it gets one."""
    told = {name: value for name, value in item.items() if value is not None}
    kind = told.setdefault("type", "message")
    if kind == "message":
        told["content"] = _parts(told["content"], of_model=told["role"] == "assistant")
    elif kind == "function_call_output" and not isinstance(told["output"], str):
        told["output"] = _parts(told["output"], of_model=False)
    elif kind == "reasoning":
        told.setdefault("summary", [])
    return {"status": "completed", **told}


def _parts(content: str | list[Json], *, of_model: bool) -> list[Json]:
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    return [_part({name: value for name, value in part.items() if value is not None}, of_model) for part in parts]


def _part(part: Json, of_model: bool) -> Json:
    if part["type"] == "input_image":
        return {"detail": "auto", **part}
    if of_model and part["type"] in ("input_text", "output_text"):
        return {"annotations": [], "logprobs": [], **part, "type": "output_text"}
    return part
