"""Finds where and why a prompt stops being the continuation of an earlier one.

Not every difference is a break: two conversations differ where their users wrote different things, and nothing is lost.
It is a break if something that both prompts contain follows the difference: that could have been read from a cache and
had to be computed again. It counts as lost.

    kind               what differs at the place
    clock, date, uuid, request_id, cwd    text that looks like it (`kinds.py`)
    noise              a header that some client writes into its system prompt (`gateway/prompts/transforms/noise.py`)
    git_status         the state of a repository: its branch, changed files, commits
    memory             what a client remembers of its user
    chunk_order        the same chunks or paragraphs, in another order
    example_order      the same examples, in another order
    tool_order         the same tools, in another order
    key_order          the same JSON, with its keys in another order
    tool_set           tools were added, removed or changed
    dropped_reasoning  an assistant's reasoning was there and is missing now
    history_rewritten  an earlier message was changed
    history_cut        messages were removed
    text               anything else in a system or user message
    template_date      nothing, but the cache was cold and the day had changed: the template prints the date
    evicted            nothing, but the cache was cold: too small, or the engine was restarted
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import msgspec

from gateway.diagnosis.kinds import kind_of_difference
from gateway.diagnosis.outline import CallOutline, PromptPart
from gateway.prefix.fingerprint import BYTES_PER_TOKEN
from gateway.prompts.transforms.order_memo import digest as meaning_of
from gateway.prompts.transforms.tool_order import tool_name

MIN_LOST_TOKENS = 32  # less than that is a block or two
CONTENT_CHARACTERS = 120  # of text around a break, if the policy lets it be stored
COLD_SHARE = 0.5  # of the tokens that must have been cached; if fewer were reported, the cache was cold

_THINKING = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>\s*", re.DOTALL)
_any = msgspec.json.Decoder()


class PrefixBreak(msgspec.Struct, frozen=True, kw_only=True):
    """Why and where a prompt did not continue an earlier one, and how many tokens had to be computed again."""

    kind: str
    place: str  # as in the request's body: tools[3], messages[0]
    role: str
    offset: int  # characters into the part
    lost_tokens: int
    within: bool  # between two turns of one conversation, not between two conversations
    before: str = ""  # the text there, then and now; only if the policy sets `diagnosis.content`
    after: str = ""


def find_break(old: CallOutline, new: CallOutline, *, content: bool = False) -> PrefixBreak | None:
    """The break between two prompts; None if `new` continues `old`, or if nothing was lost."""
    shared = _common_prefix(old.parts, new.parts)
    old_rest, new_rest = old.parts[shared:], new.parts[shared:]
    if not old_rest:  # `new` continues `old`
        return _dropped_by_client(old, new_rest) or _cold_cache(old, new, 1.0)
    if not new_rest:  # a shorter prompt with the same beginning
        return None
    kind, place, offset, repeated_characters = _difference(old_rest, new_rest)
    old_digests = {part.digest for part in old_rest}
    old_tool_meanings = {meaning_of(part.text.encode()) for part in old_rest if part.role == "tools"}
    repeated = [
        part for part in new_rest
        if part.digest in old_digests or (part.role == "tools" and meaning_of(part.text.encode()) in old_tool_meanings)
    ]  # fmt: skip
    lost = repeated_characters // BYTES_PER_TOKEN + sum(part.tokens for part in repeated if part is not place)
    if lost < MIN_LOST_TOKENS:
        old_tokens = sum(part.tokens for part in old.parts)
        return _cold_cache(old, new, 1 - sum(part.tokens for part in old_rest) / old_tokens)
    excerpts = (old_rest[0], new_rest[0]) if content else None
    return PrefixBreak(
        kind=kind, place=place.place, role=place.role, offset=offset, lost_tokens=_capped(lost, new),
        within=any(part.role == "assistant" or part.role == "user" for part in repeated),
        before=_excerpt(excerpts[0], offset) if excerpts else "",
        after=_excerpt(excerpts[1], offset) if excerpts else "",
    )  # fmt: skip


def _common_prefix(old: tuple[PromptPart, ...], new: tuple[PromptPart, ...]) -> int:
    count = 0
    for before, after in zip(old, new, strict=False):
        if before.digest != after.digest:
            break
        count += 1
    return count


def _difference(old: tuple[PromptPart, ...], new: tuple[PromptPart, ...]) -> tuple[str, PromptPart, int, int]:
    """The kind of the difference, and where it is.

    The other values are the part of `new`, the offset in it, and how many characters behind it both parts have.
    """
    before, after = old[0], new[0]
    if "tools" in (before.role, after.role):
        return _tools_difference(old, new)
    if after.digest in {part.digest for part in old[1:]}:
        return _order_kind(old, new) or "history_cut", after, 0, 0
    if before.role != after.role or before.digest in {part.digest for part in new[1:]}:
        return "history_rewritten", after, 0, 0
    if before.reasoning and not after.reasoning and before.text == after.text:
        return "dropped_reasoning", after, 0, len(after.text)
    stripped = _THINKING.sub("", before.text)
    if stripped != before.text and stripped.strip() == after.text.strip():
        return "dropped_reasoning", after, 0, len(after.text)
    if before.text == after.text:
        return ("key_order" if _same_json(before.rest, after.rest) else "history_rewritten"), after, 0, 0
    start, end = _common_ends(before.text, after.text)
    if _same_json(before.text, after.text):
        return "key_order", after, start, end
    kind, repeated = kind_of_difference(before.text, after.text, start, end)
    if kind is None:
        kind = "history_rewritten" if after.role in ("assistant", "tool") else "text"
    return kind, after, start, repeated


def _order_kind(old: tuple[PromptPart, ...], new: tuple[PromptPart, ...]) -> str | None:
    """The kind of the break if the same messages come in another order: examples, or chunks without answers."""
    old_places = {part.digest: number for number, part in enumerate(old)}
    moved = [old_places[part.digest] for part in new if part.digest in old_places]
    if moved == sorted(moved) or old[0].digest not in {part.digest for part in new}:
        return None
    return "example_order" if any(part.role == "assistant" for part in new[: len(moved)]) else "chunk_order"


def _tools_difference(old: tuple[PromptPart, ...], new: tuple[PromptPart, ...]) -> tuple[str, PromptPart, int, int]:
    before, after = old[0], new[0]
    new_tools, old_tools = ([part for part in parts if part.role == "tools"] for parts in (new, old))
    if after.role == "tools" == before.role and _same_json(before.text, after.text):
        return "key_order", after, _common_ends(before.text, after.text)[0], 0
    if sorted(meaning_of(part.text.encode()) or "" for part in new_tools) == sorted(
        meaning_of(part.text.encode()) or "" for part in old_tools
    ):
        return "tool_order", after, 0, 0
    if after.role == "tools" == before.role and _name(before) == _name(after):
        start, end = _common_ends(before.text, after.text)
        kind, repeated = kind_of_difference(before.text, after.text, start, end)
        return kind or "tool_set", after, start, repeated
    return "tool_set", after, 0, 0


def _common_ends(before: str, after: str) -> tuple[int, int]:
    """How many characters two texts have in common at their beginning, and then at their end."""
    shorter = min(len(before), len(after))
    start = _longest(shorter, lambda n: before[:n] == after[:n])
    end = _longest(shorter - start, lambda n: before[len(before) - n :] == after[len(after) - n :])
    return start, end


def _longest(longest: int, holds: Callable[[int], bool]) -> int:
    """The largest length for which `holds` is true. It must be true for all smaller ones."""
    low, high = 0, longest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _same_json(before: str, after: str) -> bool:
    if before[:1] not in ("{", "[") or after[:1] not in ("{", "["):
        return False
    try:
        return bool(_any.decode(before) == _any.decode(after))
    except (msgspec.MsgspecError, RecursionError):
        return False


def _name(tool: PromptPart) -> str:
    return tool_name(_any.decode(tool.text))


def _dropped_by_client(old: CallOutline, new_rest: tuple[PromptPart, ...]) -> PrefixBreak | None:
    """A break because the client dropped the reasoning that the deployment had generated before the answer."""
    answer = new_rest[0] if new_rest else None
    if answer is None or not old.usage.reasoning or answer.role != "assistant" or answer.reasoning:
        return None
    if answer.tokens < MIN_LOST_TOKENS or _THINKING.search(answer.text):
        return None
    return PrefixBreak(
        kind="dropped_reasoning", place=answer.place, role=answer.role, offset=0, lost_tokens=answer.tokens, within=True
    )


def _cold_cache(old: CallOutline, new: CallOutline, shared: float) -> PrefixBreak | None:
    """A break without a difference: the same deployment had cached little of what both prompts share.

    `shared` is the share of `old` with which `new` begins.
    """
    usage = new.usage
    if not (usage.exact and old.usage.exact and new.deployment is not None and new.deployment == old.deployment):
        return None
    expected = int(old.usage.input * shared)
    lost = expected - usage.cache_read
    if lost < MIN_LOST_TOKENS or usage.cache_read >= COLD_SHARE * expected:
        return None
    kind = "template_date" if _another_day(old.ended_ns, new.ended_ns) else "evicted"
    return PrefixBreak(
        kind=kind, place="", role="", offset=0, lost_tokens=_capped(lost, new), within=len(new.parts) > len(old.parts)
    )


def _another_day(before_ns: int, after_ns: int) -> bool:
    """Whether the day changed, in UTC or in local time: a template prints the date of the engine's time zone."""
    before, after = before_ns // 1_000_000_000, after_ns // 1_000_000_000
    return any(zone(before)[:3] != zone(after)[:3] for zone in (time.gmtime, time.localtime))


def _capped(lost: int, new: CallOutline) -> int:
    """The lost tokens, but no more than were computed, if the engine counted."""
    usage = new.usage
    return min(lost, usage.input_uncached + usage.cache_write) if usage.exact else lost


def _excerpt(part: PromptPart, offset: int) -> str:
    return part.text[max(0, offset - CONTENT_CHARACTERS // 2) : offset + CONTENT_CHARACTERS // 2]
