"""Items of `input` that only name an item: one that was said before, in a response that is kept.

The id of an item that was made here begins with that of its response, so that no further index is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from gateway.core.errors import BadRequest, NotFound
from gateway.endpoints.responses.reading import fields_of, read
from gateway.endpoints.responses.stored import HISTORY_BYTES_MAX, MAX_ID_CHARACTERS, RESPONSES_MAX, items_by_id
from gateway.response_store import TenantResponses

MARK = b'"item_reference"'
AT_ONCE = 16  # responses that are read before their bytes are counted

# A response's key, as calls and lines of batches have it, and the item's place in the output or the input.
_MADE_HERE = re.compile(r"[a-z]+_([0-9a-f]{24}|batch_\w+-[0-9]+-[0-9a-f]{6})(?:[0-9a-f]{2,}|i[0-9a-f]+)")


class Reference(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["item_reference"]
    id: str


async def with_items(items: Sequence[msgspec.Raw], tenant_responses: TenantResponses) -> list[msgspec.Raw]:
    """The same, with the items in place of their names. Raises `BadRequest`, `NotFound`, `Overloaded` and
    `StorageUnavailable`.
    """
    wanted: dict[int, str] = {}
    for number, item in enumerate(items):
        path = f"input[{number}]"
        if MARK in bytes(item) and bytes(fields_of(item, path).get("type", b"")) == MARK:
            wanted[number] = read(Reference, item, path).id
    found = await _items(wanted.values(), tenant_responses)
    whole = list(items)
    for number, name in wanted.items():
        if name not in found:
            raise NotFound(
                f"input[{number}].id: there is no item {name[:MAX_ID_CHARACTERS]!r} in a response that is kept",
                param=f"input[{number}].id",
            )
        whole[number] = found[name]
    return whole


async def _items(names: Iterable[str], tenant_responses: TenantResponses) -> dict[str, msgspec.Raw]:
    """By their ids, those that are kept, and others of the same responses."""
    made_here = (_MADE_HERE.fullmatch(name) for name in names if len(name) <= MAX_ID_CHARACTERS)
    responses = list(dict.fromkeys(f"resp_{match[1]}" for match in made_here if match is not None))
    found: dict[str, msgspec.Raw] = {}
    size = 0
    for start in range(0, len(responses), AT_ONCE):
        heads = [head for head in await tenant_responses.heads(responses[start : start + AT_ONCE]) if head is not None]
        held = sum(map(len, heads))
        size += held
        if len(responses) > RESPONSES_MAX or size > HISTORY_BYTES_MAX:
            raise BadRequest(
                f"input: it may refer to items of {RESPONSES_MAX} responses, with {HISTORY_BYTES_MAX} bytes",
                param="input",
            )
        tenant_responses.hold(held)
        for head in heads:
            found |= items_by_id(head)
    return found
