"""The outline of a prompt: its tools and messages in the order in which a chat template lays them out, with digests.

Two prompts share a prefix up to the first part that differs. The parts' text is kept in memory while later prompts may
be compared with it, and is written nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import xxhash

from gateway.core.cache_breakpoints import FIELD
from gateway.policy.media_formulas import DEFAULT
from gateway.prefix.fingerprint import BYTES_PER_TOKEN, seed_of
from gateway.prompts.media.counting import item_tokens
from gateway.prompts.media.encoded import HeaderBudget
from gateway.prompts.media.parts import MediaItem, media_item
from gateway.prompts.transforms.chunk_order import MAX_RUNS, chunk_runs
from gateway.types import Call, Usage

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking", "thinking_blocks")
MEDIA_CHARACTERS_MAX = 1 << 16  # of the text that stands for an image, a recording or a file
_LETTERS = str.maketrans("0123456789abcdef", "ghijklmnopqrstuv")
_TEXT_FIELDS = ("role", "content", *_REASONING_FIELDS)

_body = msgspec.json.Decoder(list[dict[str, Any]] | None)
_encode = msgspec.json.encode


class PromptPart(msgspec.Struct, frozen=True):
    """One tool or message of a prompt. `tokens` is estimated from its length."""

    place: str  # as in the request's body: tools[3], messages[0]
    role: str  # "tools" for a tool
    text: str  # the message's text, or the tool as JSON
    reasoning: str
    rest: str  # everything else of the message as JSON: tool calls, names
    digest: int
    unordered: tuple[int, ...]  # digests of its lines together, and of each run of chunks, that ignore their order

    @property
    def tokens(self) -> int:
        return (len(self.text) + len(self.reasoning) + len(self.rest)) // BYTES_PER_TOKEN + 1


class CallOutline(msgspec.Struct):
    """A call's outline and usage, with which later calls are compared."""

    call_id: str
    parts: tuple[PromptPart, ...]
    ended_ns: int  # since the epoch
    deployment: str | None
    usage: Usage

    @property
    def bytes(self) -> int:
        """The memory that the outline takes, approximately."""
        return sum(len(part.text) + len(part.reasoning) + len(part.rest) + 200 for part in self.parts)


def parts_of(call: Call) -> tuple[PromptPart, ...]:
    """The parts of a call's prompt. Raises `msgspec.MsgspecError` if it has not the shape of a chat."""
    return parts_of_fields(call.fields, seed_of(call.cache_salt))


def parts_of_fields(fields: Mapping[str, msgspec.Raw], seed: int) -> tuple[PromptPart, ...]:
    """The parts of the prompt in a chat's body, with digests that `seed` salts. Raises as `parts_of`."""
    parts = [
        _make_part(f"tools[{i}]", "tools", _text(_unmarked(tool)), "", "", seed)
        for i, tool in enumerate(_body.decode(fields.get("tools", b"null")) or ())
    ]
    for i, message in enumerate(_body.decode(fields["messages"]) or ()):
        reasoning = [_text(message[name]) for name in _REASONING_FIELDS if message.get(name)]
        rest = {name: value for name, value in message.items() if name not in _TEXT_FIELDS and name != FIELD and value}
        if isinstance(calls := rest.get("tool_calls"), list):
            rest["tool_calls"] = [_unmarked(call) for call in calls]
        content = message.get("content")
        text = "\n".join(map(_part_text, content)) if isinstance(content, list) else _text(content)
        parts.append(
            _make_part(
                f"messages[{i}]", str(message.get("role")), text, "".join(reasoning), _text(rest) if rest else "", seed
            )
        )
    return tuple(parts)


def first_user_digest(parts: tuple[PromptPart, ...]) -> int:
    """The digest of the first user message.

    It identifies the conversation, about, and is equal for all of its turns.
    """
    return next((part.digest for part in parts if part.role == "user"), 0)


def _make_part(place: str, role: str, text: str, reasoning: str, rest: str, seed: int) -> PromptPart:
    whole = "\0".join((role, text, reasoning, rest)).encode("utf-8", "surrogatepass")
    runs = (run for run in chunk_runs(text)[:MAX_RUNS] if len(run) > 1)
    sets = [text.split("\n"), *([text[chunk.start : chunk.end] for chunk in run] for run in runs)]
    unordered = ("\n".join(sorted(blocks)).encode("utf-8", "surrogatepass") for blocks in sets)
    digest, *others = (xxhash.xxh3_64_intdigest(hashed, seed) for hashed in (whole, *unordered))
    return PromptPart(place, role, text, reasoning, rest, digest, tuple(others))


def _part_text(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    item = media_item(msgspec.Raw(_encode(part)), HeaderBudget())
    return _text(_unmarked(part)) if item is None else _media_text(item)


def _media_text(item: MediaItem) -> str:
    """Text that is equal for equal media, and as long as their tokens. Without hex digits, which look like an id."""
    name = f"<{item.kind} {item.digest.hex().translate(_LETTERS)}>"
    characters = min(item_tokens(item, DEFAULT) * BYTES_PER_TOKEN, MEDIA_CHARACTERS_MAX)
    return (name * (characters // len(name) + 1))[:characters]


def _unmarked(value: Any) -> Any:
    """A value without its cache breakpoint, which moves on with each turn and breaks nothing."""
    return (
        {name: field_value for name, field_value in value.items() if name != FIELD}
        if isinstance(value, dict)
        else value
    )


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else _encode(value).decode()
