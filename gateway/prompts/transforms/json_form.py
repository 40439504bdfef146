"""P0 transform `json_form`: one way to write the same JSON, without optional whitespace and escapes.

A chat template receives values, not bytes. To it, `{"a": 1}` and `{"a":1}` are equal, and so are `"\\u00e9"` and `"é"`,
even if it prints a value with `tojson`. The order of keys and the notation of numbers are visible there (1.50 prints as
1.5, but 1.0 does not print as 1). So keys keep their order, and numbers their notation. If a key occurs twice, the last
value counts, at the place of the first, as in the parsers of Python, JavaScript and Rust.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import ClassVar

import msgspec

from gateway.prompts.transforms.base import MessagesView, Safety, TransformContext, ValueTransform

SEEN_PARTS = 16  # searched for escapes by `may_apply`
SEEN_BYTES = 1024  # of each of these parts; a client that escapes does so everywhere
SEARCHED_BYTES = 64 * 1024  # searched for escapes; a client that uses none here hardly uses any later
_ESCAPED = re.compile(rb"\\u(?!00[01])|\\/")  # control characters can only be written escaped
_decoder = msgspec.json.Decoder(float_hook=lambda digits: msgspec.Raw(digits.encode()))
_encode = msgspec.json.encode
_NEGATIVE_ZERO = re.compile(rb"[\[,:]-0[\],}]")  # Python decodes it to 0, other languages print -0
_SPACED = re.compile(rb'": |" :|[\[{] |[\n\t]')
# How most clients begin: with the spaces of Python's encoder, or with none. To recognise one of these takes a tenth of
# the search. Nothing is searched in the text after a beginning without spaces.
_USUAL_SPACES = b'[{"role": "'
_NO_SPACES = re.compile(rb'\[\{"role":"[a-z]+","content":["\[]')


class JSONForm(ValueTransform):
    """Writes JSON without optional whitespace and escapes."""

    name: ClassVar[str] = "json_form"
    safety: ClassVar[Safety] = Safety.P0
    fields: ClassVar[tuple[str, ...]] = ("messages", "tools", "functions", "response_format")

    def may_apply(self, view: MessagesView) -> bool:
        """Whether the JSON begins with whitespace between tokens, or has escapes in its parts.

        A client that writes spaces does so from the first key on. Escapes in plain text are not worth a search, because
        strings are fingerprinted decoded. Parts and tool calls are fingerprinted as they are written.
        """
        if view.plain and view.is_long:
            return False
        head = view.head
        if head.startswith(_USUAL_SPACES) or (_NO_SPACES.match(head) is None and _SPACED.search(head)):
            return True
        if view.plain:
            return False
        parts = (part for message in view.messages if type(message.content) is list for part in message.content)
        return any(b"\\u" in bytes(memoryview(part)[:SEEN_BYTES]) for part in islice(parts, SEEN_PARTS))

    def apply(self, raw: bytes, context: TransformContext) -> bytes | None:
        try:
            written = msgspec.json.format(raw, indent=-1)
            first = written.find(b"\\", 0, SEARCHED_BYTES)  # searching a byte costs a tenth of searching a pattern
            escaped = first >= 0 and _ESCAPED.search(written, first, SEARCHED_BYTES)
            if escaped and not (b"-0" in written and _NEGATIVE_ZERO.search(written)):
                written = _encode(_decoder.decode(written))
        except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
            return None  # half a surrogate pair, or an extreme depth or number: the deployment judges it
        return None if written == raw else written
