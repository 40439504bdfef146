"""Random access to a base64 payload: decodes only the bytes that a header parser asks for.

All headers of one prompt share a `HeaderBudget`, so that a client cannot make the gateway work more by sending more or
stranger files. Once it is spent, the sizes of the prompt's further media are unknown.
"""

from __future__ import annotations

import binascii
import re

ITEMS_MAX = 4_096  # images, recordings and files of one prompt; more than vendors accept
READS_MAX = 4_096  # reads of the headers of all payloads of one prompt
READ_MAX_BYTES = 2 * 2**20  # decoded from all payloads of one prompt
INFLATED_MAX_BYTES = 2**20  # decompressed from all PDFs of one prompt
WRAPPED_MAX_CHARS = 256 * 1024  # of a payload with line breaks; positions behind them cannot be computed
PROBE_CHARS = 1024  # in which a payload with line breaks has one

_SPACE = re.compile(rb"[ \t\r\n]")
_DATA_URL = re.compile(rb"\s*data:([^,;]{0,200})((?:;[^,;]{0,200}){0,8}),", re.IGNORECASE)
_HEAD_CHARS = 2_048  # in which the payload of a data URL begins
_FROM_URL_SAFE = bytes.maketrans(b"-_", b"+/")


class HeaderBudget:
    """What may still be read of one prompt's media."""

    __slots__ = ("bytes", "inflated_bytes", "items", "reads")

    def __init__(self) -> None:
        self.items = ITEMS_MAX
        self.reads = READS_MAX
        self.bytes = READ_MAX_BYTES
        self.inflated_bytes = INFLATED_MAX_BYTES


class EncodedFile:
    """A file whose content is base64. `size` is its length in bytes, as the length of the base64 says."""

    def __init__(self, payload: memoryview, budget: HeaderBudget) -> None:
        self._chars = payload
        if _SPACE.search(payload[:PROBE_CHARS]):
            self._chars = memoryview(bytes(payload[:WRAPPED_MAX_CHARS]).translate(None, b" \t\r\n"))
        padding = bytes(payload[-4:]).count(b"=")
        self.size = max(0, len(payload) * 3 // 4 - padding)
        self.budget = budget

    def read(self, at: int, length: int) -> bytes:
        """Bytes from position `at`; fewer than `length` at the end, or if it is not base64, or beyond the budget."""
        budget = self.budget
        length = min(length, self.size - at, budget.bytes)
        if at < 0 or length <= 0 or budget.reads <= 0:
            return b""
        budget.reads -= 1
        budget.bytes -= length
        start, skipped = at // 3 * 4, at % 3
        chars = bytes(self._chars[start : start + (skipped + length + 2) // 3 * 4]).translate(_FROM_URL_SAFE)
        try:
            return binascii.a2b_base64(chars[: len(chars) // 4 * 4])[skipped : skipped + length]
        except binascii.Error:
            return b""


def split_data_url(url: memoryview) -> tuple[bytes, memoryview] | None:
    """The media type in lower case and the base64 payload of a data URL. None for any other URL."""
    match = _DATA_URL.match(url[:_HEAD_CHARS])
    if match is None or b";base64" not in match[2].lower().replace(b" ", b""):
        return None
    return match[1].strip().lower(), url[match.end() :]
