"""Parses large request bodies without holding the event loop, and refuses bodies of absurdly many values.

Parsing a body of megabytes takes tens of milliseconds, and seconds if it consists of many small values, for which the
gateway makes a Python object each. So a large body is parsed in a thread. The thread holds Python's global lock for one
call into the JSON decoder at a time, and the bounds on values keep each such call short.
"""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor

from gateway.core.errors import BadRequest
from gateway.prompts.reader import BodyReader, ParsedBody, read_fields
from gateway.types import Operation

LARGE_BYTES = 512 * 1024  # a body with fewer bytes and values is parsed at once, within some milliseconds
MANY_VALUES = 10_000
MAX_VALUES = 300_000  # of one body, most of which can only be token ids
MAX_STRINGS = 100_000  # of one body, keys included: some twenty thousand messages
SCANNED_BYTES = 256 * 1024  # of what is between two strings, per step of the scan

_QUOTE = ord('"')
# Some of a string's characters, at most so many that finding them takes a few milliseconds.
_STRING_PART = re.compile(rb'(?:[^"\\]{1,4096}+|\\.){0,256}+', re.DOTALL)


class BodyParser:
    """Parses the bodies of all requests: small ones at once, and large ones in a thread, one after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="large bodies")  # starts when it is needed

    async def parse(self, endpoint: BodyReader, body: bytes) -> ParsedBody:
        """Check and parse a body. Raises `BadRequest`."""
        if not is_large(body):
            return parse(endpoint, body)
        return await asyncio.get_running_loop().run_in_executor(self._thread, _check_and_parse, endpoint, body)

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def parse(endpoint: BodyReader, body: bytes) -> ParsedBody:
    """Check and parse a body. Raises `BadRequest`."""
    return endpoint.read({} if _is_form(endpoint, body) else read_fields(body), body)


def _is_form(endpoint: BodyReader, body: bytes) -> bool:
    """Whether the body is a form with a file, which only some endpoints read. No JSON begins like one."""
    return endpoint.operation is Operation.PASSED and body.startswith(b"--")


def is_large(body: bytes) -> bool:
    """Whether parsing the body may take long. There is a comma between any two values that are not nested."""
    return len(body) > LARGE_BYTES or (len(body) > 2 * MANY_VALUES and body.count(b",") > MANY_VALUES)


def _check_and_parse(endpoint: BodyReader, body: bytes) -> ParsedBody:
    if not _is_form(endpoint, body):
        check_values(body)
    return parse(endpoint, body)


def check_values(body: bytes) -> None:
    """Raise `BadRequest` if the body has too many values. The body need not be valid JSON."""
    if body.count(b",") <= MANY_VALUES:
        return
    strings = values = end = 0
    while (start := body.find(b'"', end)) >= 0 and values <= MAX_VALUES:
        strings += 1
        if strings > MAX_STRINGS:
            raise BadRequest(f"the body has more than {MAX_STRINGS} strings, field names included")
        values += _commas(body, end, start)
        end = _string_end(body, start + 1)
    if values + _commas(body, end, len(body)) > MAX_VALUES:
        raise BadRequest(f"the body has more than {MAX_VALUES} values")


def _string_end(body: bytes, at: int) -> int:
    """Return the offset after the quote that ends the string whose content begins at `at`."""
    while True:
        part = _STRING_PART.match(body, at)
        assert part is not None  # it also matches nothing
        at = part.end()
        if at >= len(body) or body[at] == _QUOTE or part.start() == at:
            return at + 1


def _commas(body: bytes, start: int, end: int) -> int:
    """Count the commas between two strings, in steps that let other threads run."""
    return sum(body.count(b",", at, min(at + SCANNED_BYTES, end)) for at in range(start, end, SCANNED_BYTES))
