"""P0: one way to write the same JSON. No whitespace between its tokens, no escapes that are not needed.

A chat template is given values, not bytes: `{"a": 1}` and `{"a":1}`, `"\\u00e9"` and `"é"` are the same to it, also
where it prints a value with `tojson`. The order of keys is visible there, and so is how a number is written (1.50 is
printed as 1.5, but 1.0 not as 1), so keys stay in their order, and numbers as they are written.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import ClassVar

import msgspec

from gateway.prompts.transforms.base import MessagesView, Safety, TransformContext, ValueTransform

SEEN_PARTS = 16
SEEN_BYTES = 1024  # of each of these parts: who escapes, escapes everywhere
SEARCHED_BYTES = 64 * 1024  # for escapes: who needs none here will hardly need them further on
_ESCAPED = re.compile(rb"\\u(?!00[01])|\\/")  # control characters have no other form
_decoder = msgspec.json.Decoder(float_hook=lambda digits: msgspec.Raw(digits.encode()))
_encode = msgspec.json.encode
_SPACED = re.compile(rb'": |" :|[\[{] |[\n\t]')


class JSONForm(ValueTransform):
    name: ClassVar[str] = "json_form"
    safety: ClassVar[Safety] = Safety.P0
    fields: ClassVar[tuple[str, ...]] = ("messages", "tools", "functions", "response_format")

    def sees(self, view: MessagesView) -> bool:
        """Who writes spaces writes them from the first key on. That text was escaped is not worth a search of all of
        it: strings are fingerprinted decoded. Parts and tool calls are fingerprinted as they are written.
        """
        if view.plain and view.long:
            return False
        if _SPACED.search(view.head):
            return True
        if view.plain:
            return False
        parts = (part for message in view.messages if type(message.content) is list for part in message.content)
        return any(b"\\u" in bytes(memoryview(part)[:SEEN_BYTES]) for part in islice(parts, SEEN_PARTS))

    def apply(self, raw: bytes, context: TransformContext) -> bytes | None:
        try:
            written = msgspec.json.format(raw, indent=-1)
            first = written.find(b"\\", 0, SEARCHED_BYTES)  # a search for one byte is a tenth of one for a pattern
            if first >= 0 and _ESCAPED.search(written, first, SEARCHED_BYTES):
                written = _encode(_decoder.decode(written))
        except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
            return None  # half a surrogate pair, or depths and numbers beyond reason: the server is to judge
        return None if written == raw else written
