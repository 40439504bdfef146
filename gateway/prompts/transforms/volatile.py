"""Finds text that changes from request to request although the prompt means the same, by its form.

The detectors only recognise forms. They cannot know whether a date is today's or belongs to the prompt's topic. So
`move_volatile.py` also requires a word next to it that says what it is, or a place where only a mark of the request can
stand, and the diagnosis looks only where two prompts differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)"
)
_ORDINAL = (
    r"(?:(?:twenty|thirty)[- ])?(?:first|second|third|fourth|fifth|sixth|seventh|eighth|ninth)|tenth|eleventh|twelfth"
    r"|thirteenth|fourteenth|fifteenth|sixteenth|seventeenth|eighteenth|nineteenth|twentieth|thirtieth"
)
_OF_MONTH = rf"(?:\sday)?\sof\s{_MONTH}"
_YEAR = r"(?:,?\s\d{4})"
_DAY = r"\d{4}-\d\d-\d\d"
_TIME = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?"
_ZONE = r"(?:\s?(?:Z|UTC|GMT|[A-Z]{3,4}|[+-]\d\d:?\d\d)\b)?"
_ID_OF = r"(?i:request|trace|session|correlation|run|conversation|thread|message|span|invocation|nonce|job|cch)"

KINDS: dict[str, re.Pattern[str]] = {  # if two match, the first one applies
    "uuid": re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"),
    "clock": re.compile(
        rf"(?:\b{_DAY}[T ]|\b){_TIME}{_ZONE}"
        # seconds, milliseconds, microseconds or nanoseconds since 1970, also within a word
        r"|(?<!\d)1[5-9]\d{8}(?:\d{3}){0,3}(?:\.\d+)?(?!\d)"
    ),
    "date": re.compile(
        rf"\b{_DAY}\b|\b\d{{1,2}}\s{_MONTH}\.?{_YEAR}\b|\b\d{{1,2}}(?:st|nd|rd|th)\s{_MONTH}\b\.?{_YEAR}?"
        rf"|\b{_MONTH}\.?\s(?:the\s)?\d{{1,2}}(?:st|nd|rd|th)?\b{_YEAR}?|\b(?i:{_ORDINAL}){_OF_MONTH}\b{_YEAR}?"
        rf"|\b\d{{1,2}}(?:st|nd|rd|th)?{_OF_MONTH}\b{_YEAR}?|\b{_MONTH}\s(?i:{_ORDINAL})\b{_YEAR}?"
        r"|\b\d{1,2}[/.]\d{1,2}[/.](?:\d{4}|\d{2})\b|\b\d{4}/\d{1,2}/\d{1,2}\b"
        r"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
    ),
    "cwd": re.compile(
        r"(?i:\b(?:cwd|pwd|work(?:ing)?[ _-]?dir(?:ectory)?|current[ _-]dir(?:ectory)?|project[ _-]root)\b)\W{1,4}\S+"
        r"|(?<![\w/.])/(?:home|Users|tmp|var|opt|srv|root|mnt|workspace|workspaces|private)/[^\s\"'`<>]+"
        r"|\b[A-Z]:\\[^\s\"'`<>]+"
    ),
    "request_id": re.compile(
        rf"\b{_ID_OF}[ _-]?(?i:ids?\b)?\W{{1,3}}[\w.:-]{{5,128}}"
        r"|\b(?:req|msg|sess|run|trace|chatcmpl|conv|thread|job)[_-](?=\w*\d)\w{6,64}\b"
        r"|\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{16,64}\b"
        # hexadecimal digits in brackets, or behind a sign
        r"|[\[({<](?=[0-9a-fA-F]*\d)[0-9a-fA-F]{6,64}[\])}>]|[#@](?=[0-9a-f]*\d)[0-9a-f]{6,64}\b"
    ),
}


class Span(NamedTuple):
    """Volatile text at [start, end)."""

    kind: str
    start: int
    end: int


def spans(text: str) -> Iterator[Span]:
    """Everything that looks volatile, kind by kind. Spans of different kinds may overlap."""
    for kind, pattern in KINDS.items():
        for match in pattern.finditer(text):
            yield Span(kind, match.start(), match.end())


def kind_at(text: str, start: int, end: int) -> str | None:
    """The kind of what is at [start, end), if it looks volatile.

    If several spans touch it, one that begins at or before `start` applies, and of those the first kind.
    """
    touching = [span for span in spans(text) if span.start <= end and span.end >= start]
    order = list(KINDS)
    return min(touching, key=lambda span: (span.start > start, order.index(span.kind))).kind if touching else None
