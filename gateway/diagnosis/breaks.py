"""Where and why a prompt stops being the continuation of an earlier one.

A break is not every difference: two conversations differ where their users said different things, and nothing is lost
by that. It is one where something that both have in common stands behind the place at which they part, so that it
could have been read from a cache and had to be computed again. What was lost is that much.

    kind               what differs at the place
    clock, date, uuid, request_id, cwd    text that looks like it (`gateway/prompts/transforms/volatile.py`)
    noise              a header that some client writes into its system prompt (`gateway/prompts/transforms/noise.py`)
    tool_order         the same tools, in another order
    key_order          the same JSON, with its keys in another order
    tool_set           tools were added, taken away or changed
    dropped_reasoning  an assistant's reasoning was there and is gone
    history_rewritten  what was said before was changed
    history_cut        messages were taken out
    text               anything else in the words of system or user
    template_date      nothing, but the server was cold and the day had changed: its template prints the date
    evicted            nothing, but the server was cold: its cache was too small, or it was started again
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import msgspec

from gateway.diagnosis.outline import CallOutline, PromptPart
from gateway.prefix.fingerprint import BYTES_PER_TOKEN
from gateway.prompts.transforms.noise import SIGNATURES
from gateway.prompts.transforms.order_memo import digest as meaning_of
from gateway.prompts.transforms.tool_order import tool_name
from gateway.prompts.transforms.volatile import kind_at

MIN_LOST_TOKENS = 32  # less is no more than a block or two
WINDOW_CHARACTERS = 200  # around a difference, in which detectors look
CONTENT_CHARACTERS = 120  # of the words around a break, where they are kept
COLD_SHARE = 0.5  # a server that reports less than this of what it must have had, was cold

_NOISE = re.compile("|".join(SIGNATURES.values()))
_THINKING = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>\s*", re.DOTALL)
_any = msgspec.json.Decoder()


class PrefixBreak(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    place: str  # as in the request's body: tools[3], messages[0]
    role: str
    offset: int  # characters into the part
    lost_tokens: int
    within: bool  # between two turns of one conversation, not between two conversations
    before: str = ""  # the words there, then and now; only where the policy has them kept
    after: str = ""


def find_break(old: CallOutline, new: CallOutline, *, content: bool = False) -> PrefixBreak | None:
    """Why `new` could not go on where `old` was; None where it could, or nothing was lost."""
    shared = _common_prefix(old.parts, new.parts)
    rest_old, rest_new = old.parts[shared:], new.parts[shared:]
    if not rest_old:
        return _dropped_by_client(old, rest_new) or _cold(old, new, 1.0)
    if not rest_new:
        return None
    kind, place, offset, ends_alike = _difference(rest_old, rest_new)
    known = {part.digest for part in rest_old}
    meanings = {meaning_of(part.text.encode()) for part in rest_old if part.role == "tools"}
    again = [
        part for part in rest_new
        if part.digest in known or (part.role == "tools" and meaning_of(part.text.encode()) in meanings)
    ]  # fmt: skip
    lost = ends_alike // BYTES_PER_TOKEN + sum(part.tokens for part in again if part is not place)
    if lost < MIN_LOST_TOKENS:
        whole = sum(part.tokens for part in old.parts)
        return _cold(old, new, 1 - sum(part.tokens for part in rest_old) / whole)
    said = (rest_old[0], rest_new[0]) if content else None
    return PrefixBreak(
        kind=kind, place=place.place, role=place.role, offset=offset, lost_tokens=_at_most(lost, new),
        within=any(part.role == "assistant" or part.role == "user" for part in again),
        before=_excerpt(said[0], offset) if said else "", after=_excerpt(said[1], offset) if said else "",
    )  # fmt: skip


def _common_prefix(old: tuple[PromptPart, ...], new: tuple[PromptPart, ...]) -> int:
    count = 0
    for before, after in zip(old, new, strict=False):
        if before.digest != after.digest:
            break
        count += 1
    return count


def _difference(old: tuple[PromptPart, ...], new: tuple[PromptPart, ...]) -> tuple[str, PromptPart, int, int]:
    """Kind, the part of `new`, the offset in it, and how many characters at its end are as before."""
    before, after = old[0], new[0]
    if "tools" in (before.role, after.role):
        return _of_tools(old, new)
    if after.digest in {part.digest for part in old[1:]}:
        return "history_cut", after, 0, 0
    if before.role != after.role or before.digest in {part.digest for part in new[1:]}:
        return "history_rewritten", after, 0, 0
    if before.reasoning and not after.reasoning and before.text == after.text:
        return "dropped_reasoning", after, 0, len(after.text)
    stripped = _THINKING.sub("", before.text)
    if stripped != before.text and stripped.strip() == after.text.strip():
        return "dropped_reasoning", after, 0, len(after.text)
    if before.text == after.text:
        return ("key_order" if _same_json(before.rest, after.rest) else "history_rewritten"), after, 0, 0
    start, end = _ends(before.text, after.text)
    if _same_json(before.text, after.text):
        return "key_order", after, start, end
    kind = _kind(before.text, after.text, start, end)
    if kind is None:
        kind = "history_rewritten" if after.role in ("assistant", "tool") else "text"
    return kind, after, start, end


def _of_tools(old: tuple[PromptPart, ...], new: tuple[PromptPart, ...]) -> tuple[str, PromptPart, int, int]:
    before, after = old[0], new[0]
    ours, theirs = ([part for part in parts if part.role == "tools"] for parts in (new, old))
    if after.role == "tools" == before.role and _same_json(before.text, after.text):
        return "key_order", after, _ends(before.text, after.text)[0], 0
    if sorted(meaning_of(part.text.encode()) or "" for part in ours) == sorted(
        meaning_of(part.text.encode()) or "" for part in theirs
    ):
        return "tool_order", after, 0, 0
    if after.role == "tools" == before.role and _name(before) == _name(after):
        start, end = _ends(before.text, after.text)
        return _kind(before.text, after.text, start, end) or "tool_set", after, start, end
    return "tool_set", after, 0, 0


def _kind(before: str, after: str, start: int, end: int) -> str | None:
    """What looks volatile at the difference, in both. The words around it decide with it, but not far around."""
    kinds = []
    for text in (before, after):
        low, high = max(0, start - WINDOW_CHARACTERS), min(len(text), start + WINDOW_CHARACTERS)
        if any(match.start() <= start - low <= match.end() for match in _NOISE.finditer(text[low:high])):
            kinds.append("noise")
        else:
            kinds.append(kind_at(text[low:high], start - low, min(high, max(start, len(text) - end)) - low) or "")
    return next((kind for kind in reversed(kinds) if kind), None)


def _ends(before: str, after: str) -> tuple[int, int]:
    """How many characters two texts have in common at their beginning, and then at their end."""
    shorter = min(len(before), len(after))
    start = _agree(shorter, lambda n: before[:n] == after[:n])
    end = _agree(shorter - start, lambda n: before[len(before) - n :] == after[len(after) - n :])
    return start, end


def _agree(longest: int, agrees: Callable[[int], bool]) -> int:
    """The longest length at which `agrees`, which is so for all shorter ones."""
    low, high = 0, longest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if agrees(middle) else (low, middle - 1)
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


def _dropped_by_client(old: CallOutline, rest_new: tuple[PromptPart, ...]) -> PrefixBreak | None:
    """The server has thought, and the client does not send back what: the answer after it is not where it was."""
    answer = rest_new[0] if rest_new else None
    if answer is None or not old.usage.reasoning or answer.role != "assistant" or answer.reasoning:
        return None
    if answer.tokens < MIN_LOST_TOKENS or _THINKING.search(answer.text):
        return None
    return PrefixBreak(
        kind="dropped_reasoning", place=answer.place, role=answer.role, offset=0, lost_tokens=answer.tokens, within=True
    )


def _cold(old: CallOutline, new: CallOutline, shared: float) -> PrefixBreak | None:
    """`new` begins as `old` did, for so large a share of `old`, at the same server, which remembers nothing of it."""
    usage = new.usage
    if not (usage.exact and old.usage.exact and new.deployment is not None and new.deployment == old.deployment):
        return None
    expected = int(old.usage.input * shared)
    lost = expected - usage.cache_read
    if lost < MIN_LOST_TOKENS or usage.cache_read >= COLD_SHARE * expected:
        return None
    kind = "template_date" if _another_day(old.ended_ns, new.ended_ns) else "evicted"
    return PrefixBreak(
        kind=kind, place="", role="", offset=0, lost_tokens=_at_most(lost, new), within=len(new.parts) > len(old.parts)
    )


def _another_day(before_ns: int, after_ns: int) -> bool:
    """In UTC or here: a server prints the date of its own zone."""
    before, after = before_ns // 1_000_000_000, after_ns // 1_000_000_000
    return any(zone(before)[:3] != zone(after)[:3] for zone in (time.gmtime, time.localtime))


def _at_most(lost: int, new: CallOutline) -> int:
    """No more than was computed, where the server has counted."""
    usage = new.usage
    return min(lost, usage.input_uncached + usage.cache_write) if usage.exact else lost


def _excerpt(part: PromptPart, offset: int) -> str:
    return part.text[max(0, offset - CONTENT_CHARACTERS // 2) : offset + CONTENT_CHARACTERS // 2]
