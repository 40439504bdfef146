"""Parses large request bodies without holding the event loop, and refuses bodies of absurdly many values.

Parsing a body of megabytes takes tens of milliseconds, and seconds if it consists of many small values, for which the
gateway makes a Python object each. So a large body is parsed in a thread. The thread holds Python's global lock for one
call into the JSON decoder at a time, and the bounds on values keep each such call short.
"""

from __future__ import annotations

import re
from functools import lru_cache

from gateway.core.errors import BadRequest
from gateway.core.worker_thread import LARGE_BYTES
from gateway.prompts.reader import MAX_FIELDS, BodyReader, ParsedBody, read_fields
from gateway.types import Operation

MANY_VALUES = 10_000
MAX_VALUES = 300_000  # of one body, most of which can only be token ids
MAX_STRINGS = 100_000  # of one body, keys included: some twenty thousand messages
SCANNED_BYTES = 256 * 1024  # per step of the scans
SHORT_BYTES = 32  # most of what is between two strings is shorter

_PASSED = Operation.PASSED
_QUOTE = ord('"')
# Some of a string's characters, at most so many that finding them takes a few milliseconds.
_STRING_PART = re.compile(rb'(?:[^"\\]{1,4096}+|\\.){0,256}+', re.DOTALL)


def parse(endpoint: BodyReader, body: bytes) -> ParsedBody:
    """Check and parse a body. Raises `BadRequest`."""
    if endpoint.operation is _PASSED and _is_form(endpoint, body):
        return endpoint.read({}, body)
    return endpoint.read(read_fields(body), body)


def _is_form(endpoint: BodyReader, body: bytes) -> bool:
    """Whether the body is a form with a file, which only some endpoints read. No JSON begins like one."""
    return endpoint.operation is _PASSED and body.startswith(b"--")


def is_large(body: bytes) -> bool:
    """Whether parsing the body may take long: it is long, or has many commas and so perhaps many values."""
    return len(body) > LARGE_BYTES or (len(body) > 2 * MANY_VALUES and _has_more(body, b",", MANY_VALUES))


def check_and_parse(endpoint: BodyReader, body: bytes) -> ParsedBody:
    """As `parse`, for a large body: also checks how many values it has."""
    if not _is_form(endpoint, body):
        check_values(body)
    return parse(endpoint, body)


def check_values(body: bytes) -> None:
    """Raise `BadRequest` if the body has too many values or fields. The body need not be valid JSON."""
    if not _has_more(body, b",", MANY_VALUES):
        return
    # Prose has commas, too. If there are few quotes, nothing depends on which commas stand in strings.
    if not _has_more(body, b'"', 2 * MANY_VALUES) and not _has_more(body, b",", MAX_VALUES):
        return
    strings = values = depth = end = 0
    left = 2 * MAX_FIELDS if body[:SHORT_BYTES].lstrip().startswith(b"{") else MAX_STRINGS  # strings at the top level
    while (start := body.find(b'"', end)) >= 0 and values <= MAX_VALUES:
        commas, nested = _between(body, end, start)
        values += commas
        depth += nested
        strings += 1
        left -= depth == 1
        if strings > MAX_STRINGS:
            raise BadRequest(f"the body has more than {MAX_STRINGS} strings, field names included")
        if left < 0:
            raise BadRequest(f"the body has more than {MAX_FIELDS} fields")
        end = _string_end(body, start + 1)
    if values + _between(body, end, len(body))[0] > MAX_VALUES:
        raise BadRequest(f"the body has more than {MAX_VALUES} values")


def _has_more(body: bytes, character: bytes, bound: int) -> bool:
    """Whether a character occurs more than `bound` times.

    `bytes.count` compares byte by byte, and takes five times as long in prose. `bytes.replace` searches with `memchr`,
    and stops after the last replacement.
    """
    left = bound + 1
    for at in range(0, len(body), SCANNED_BYTES):
        part = body[at : at + SCANNED_BYTES]
        left -= len(part) - len(part.replace(character, b"", left))
        if left <= 0:
            return True
    return False


def _between(body: bytes, start: int, end: int) -> tuple[int, int]:
    """What is between two strings: the number of commas, and how much deeper the nesting is at the end."""
    if end - start <= SHORT_BYTES:
        return _counts(body[start:end])
    parts = [_count(body[at : min(at + SCANNED_BYTES, end)]) for at in range(start, end, SCANNED_BYTES)]
    return sum(commas for commas, _ in parts), sum(nested for _, nested in parts)


def _count(part: bytes) -> tuple[int, int]:
    nested = part.count(b"{") + part.count(b"[") - part.count(b"}") - part.count(b"]")
    return part.count(b","), nested


_counts = lru_cache(maxsize=1000)(_count)  # most short parts are one of a few, such as a colon


def _string_end(body: bytes, at: int) -> int:
    """Return the offset after the quote that ends the string whose content begins at `at`."""
    while True:
        part = _STRING_PART.match(body, at)
        assert part is not None  # it also matches nothing
        at = part.end()
        if at >= len(body) or body[at] == _QUOTE or part.start() == at:
            return at + 1
