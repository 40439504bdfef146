"""Says what a difference between two texts is, by the form of the text around it.

The first of these that applies is the kind:

1. a known header (`gateway/prompts/transforms/noise.py`)
2. the same blocks in another order: chunks, examples, memories
3. a section under a heading that says what it is: the state of a repository, memories. A line that itself says what
   it is, as in `Current time: 09:41`, does not belong to the section.
4. text that is different for each request: a clock, a date, an id, a folder (`gateway/prompts/transforms/volatile.py`)

Everything else is called text. A detector knows forms only. Whether a policy line helps is decided by the replay
(`replay.py`), not by the kind.
"""

from __future__ import annotations

import re
from itertools import pairwise

from gateway.prompts.transforms.chunk_order import chunk_runs
from gateway.prompts.transforms.move_volatile import is_volatile
from gateway.prompts.transforms.noise import SIGNATURES
from gateway.prompts.transforms.volatile import kind_at

WINDOW_CHARACTERS = 200  # around a difference, in which the detectors search
SECTION_CHARACTERS = 4000  # before a difference, in which its heading is searched
MAX_BLOCKS = 10_000  # of a text; one with more is not searched for blocks in another order

_NOISE = re.compile("|".join(SIGNATURES.values()))

_SECTIONS: dict[str, re.Pattern[str]] = {
    "git_status": re.compile(
        r"(?im)^.{0,40}\bgit[ _]?status\b|^.{0,20}\bcurrent branch: |^on branch \S+|^.{0,20}\brecent commits:"
        r"|^changes (?:not staged for commit|to be committed):|^untracked files:"
    ),
    "memory": re.compile(
        r"(?im)^[#*<\[ ]{0,6}(?:\w+[_ ]){0,3}(?:memory|memories)(?:[_ ]\w+){0,4}[\])>*]{0,3}:?\s*$"
        r"|^.{0,60}\b(?:remember(?:ed)? about|(?:saved|relevant|user|stored) memories|facts about the user)\b"
        r".{0,40}:\s*$"
    ),
}
_HEADING = re.compile(r"(?m)^(?:#{1,6} .*|</?[A-Za-z][\w -]*>\s*|[A-Z*][^\n]{0,60}:\s*)$")
_EXAMPLE = re.compile(
    r"(?im)^\W{0,3}(?:<example|(?:few-?shot )?example\b|(?:input|output)\b\W|(?:q|question)\s*[:.)]|(?:user|human)\s*:)"
)
_MEMORY_WORD = re.compile(r"^[^/]*\bmemor(?:y|ies)\b")
_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s")
_BLANK_LINES = re.compile(r"\n\s*\n")


def kind_of_difference(before: str, after: str, start: int, end: int) -> tuple[str | None, int]:
    """The kind of a difference, None if it is only text, and how many characters of `after` are in `before`, too.

    The texts have their first `start` and their last `end` characters in common. Only characters behind the difference
    count.
    """
    lows = max(0, start - WINDOW_CHARACTERS)
    windows = [
        (text[lows : start + WINDOW_CHARACTERS], start - lows, len(text) - end - lows) for text in (before, after)
    ]
    if any(match.start() <= at <= match.end() for text, at, _ in windows for match in _NOISE.finditer(text)):
        return "noise", end
    section = _section_at(after, start)
    if (order := _reordered(before, after)) is not None:
        kind, characters = order
        return section if section == "memory" else kind, max(characters, end)
    if section is not None and not _names_itself(after, start):
        return section, end
    kinds = [kind_at(text, at, min(len(text), max(at, stop))) for text, at, stop in windows]
    return next((kind for kind in reversed(kinds) if kind), None), end


def _names_itself(text: str, at: int) -> bool:
    """Whether the line at the place says what changes in it. The items of a list do not."""
    line = text[text.rfind("\n", 0, at) + 1 :].partition("\n")[0]
    return is_volatile(line) and not _ITEM.match(line)


def _section_at(text: str, at: int) -> str | None:
    """The kind of the section that the place is in, by the last heading before it."""
    low = max(0, at - SECTION_CHARACTERS)
    before = text[low : max(at, text.find("\n", at))]
    found = [(match.end(), kind) for kind, pattern in _SECTIONS.items() for match in pattern.finditer(before)]
    if not found:
        return None
    end, kind = max(found)
    others = (match for match in _HEADING.finditer(before, end) if match.start() <= at - low)
    return kind if all(_belongs(kind, match[0]) for match in others) else None


def _belongs(kind: str, heading: str) -> bool:
    """Whether a heading is part of a section: a repository's state has several headings, and memories may have two."""
    words = heading.strip().lower()
    return words in {"status:", "recent commits:"} if kind == "git_status" else _MEMORY_WORD.search(words) is not None


def _reordered(before: str, after: str) -> tuple[str, int] | None:
    """The kind of the blocks that come in another order, and their length; None if it is not their order that differs.

    Where the texts part, each has a block that the other one has elsewhere.
    """
    for blocks_of in (_chunks, _paragraphs, str.splitlines):
        old, new = blocks_of(before), blocks_of(after)
        if max(len(old), len(new)) > MAX_BLOCKS:
            continue
        parted = next((i for i, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), None)
        if parted is None:
            continue
        old_rest, new_rest = set(old[parted:]), set(new[parted:])
        if old[parted].strip() and new[parted].strip() and old[parted] in new_rest and new[parted] in old_rest:
            common = [block for block in new[parted:] if block in old_rest]
            examples = blocks_of is not _chunks and any(map(_EXAMPLE.search, common))
            return "example_order" if examples else "chunk_order", sum(map(len, common))
    return None


def _chunks(text: str) -> list[str]:
    """The text cut at the ends of its marked chunks."""
    cuts = [0, *(edge for run in chunk_runs(text) for span in run for edge in span), len(text)]
    return [piece for low, high in pairwise(cuts) if (piece := text[low:high].strip())]


def _paragraphs(text: str) -> list[str]:
    return [block.strip() for block in _BLANK_LINES.split(text) if block.strip()]
