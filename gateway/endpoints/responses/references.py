"""Resolves `item_reference` items of `input`, which name an item of a stored response instead of repeating the item.

The id of an item that this gateway made contains the key of its response, so no index of items is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from gateway.core.errors import BadRequest, NotFound
from gateway.endpoints.responses.stored import HISTORY_BYTES_MAX, MAX_ID_CHARACTERS, RESPONSES_MAX, items_by_id
from gateway.endpoints.responses.strict_json import fields_of, read
from gateway.response_store import TenantResponses

REFERENCE_TYPE = b'"item_reference"'
LOADED_AT_ONCE = 16  # number of responses to load before their bytes are counted

# Matches an item id: the response's key, from a call or from a batch line, and the item's index in output or input.
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{24}|batch_\w+-[0-9]+-[0-9a-f]{6})(?:[0-9a-f]{2,}|i[0-9a-f]+)")


class ItemReference(msgspec.Struct, forbid_unknown_fields=True):
    """An input item that names a stored item by its id."""

    type: Literal["item_reference"]
    id: str


async def resolve_references(items: Sequence[msgspec.Raw], tenant_responses: TenantResponses) -> list[msgspec.Raw]:
    """Return the items with each reference replaced by the stored item that it names.

    `tenant_responses` reserves the memory for the loaded responses. Raises `BadRequest`, `NotFound`, `Overloaded` and
    `StorageUnavailable`.
    """
    wanted: dict[int, str] = {}
    for number, item in enumerate(items):
        path = f"input[{number}]"
        if REFERENCE_TYPE in bytes(item) and bytes(fields_of(item, path).get("type", b"")) == REFERENCE_TYPE:
            wanted[number] = read(ItemReference, item, path).id
    found = await _load_items(wanted.values(), tenant_responses)
    resolved = list(items)
    for number, name in wanted.items():
        if name not in found:
            raise NotFound(
                f"input[{number}].id: no stored response has an item {name[:MAX_ID_CHARACTERS]!r}",
                param=f"input[{number}].id",
            )
        resolved[number] = found[name]
    return resolved


async def _load_items(names: Iterable[str], tenant_responses: TenantResponses) -> dict[str, msgspec.Raw]:
    """Return, by id, all items of the stored responses that contain the named items."""
    matches = (_ITEM_ID.fullmatch(name) for name in names if len(name) <= MAX_ID_CHARACTERS)
    responses = list(dict.fromkeys(f"resp_{match[1]}" for match in matches if match is not None))
    found: dict[str, msgspec.Raw] = {}
    size = 0
    for start in range(0, len(responses), LOADED_AT_ONCE):
        page = responses[start : start + LOADED_AT_ONCE]
        heads = [head for head in await tenant_responses.heads(page) if head is not None]
        held = sum(map(len, heads))
        size += held
        if len(responses) > RESPONSES_MAX or size > HISTORY_BYTES_MAX:
            raise BadRequest(
                f"input: may refer to items of at most {RESPONSES_MAX} responses, with {HISTORY_BYTES_MAX} bytes in "
                "total",
                param="input",
            )
        tenant_responses.hold(held)
        for head in heads:
            found |= items_by_id(head)
    return found
