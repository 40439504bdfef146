"""Tool calls of Mistral: `[TOOL_CALLS]`, then `[{"name": "f", "arguments": {...}}, ...]` or `f[ARGS]{...}`.

In the first form, the marker `[TOOL_CALLS]` precedes a list of calls. In the second form, it precedes each call. Models
with tokenizer version 11 or later write the second form, some of them without `[ARGS]`.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence

from backend.parsers.base import CallableTool, OutputParser
from backend.parsers.json_list import JsonListFormat, JsonListParser

OPEN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ID_CHARACTERS, ID_LENGTH = string.ascii_letters + string.digits, 9  # Mistral's chat templates reject any other id

_HEAD = re.compile(r"([A-Za-z0-9_.\-]+)\s*(?:\[CALL_ID\][A-Za-z0-9]*\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_MAYBE_HEAD = re.compile(r"[A-Za-z0-9_.\-\s\[\]]*")
MAX_HEAD_CHARACTERS = 256


class MistralFormat(JsonListFormat):
    """Format of calls after `[TOOL_CALLS]`, as a JSON list or one by one. The grammar allows only the list."""

    def __init__(self) -> None:
        super().__init__(OPEN)
        self.markers = (OPEN, ARGUMENTS, CALL_ID)

    def parser(self, tools: Sequence[CallableTool]) -> OutputParser:
        return MistralParser()

    def new_id(self, name: str, number: int) -> str:
        return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))


class MistralParser(JsonListParser):
    """Parser of one output with calls after `[TOOL_CALLS]`, as a JSON list or one by one."""

    def __init__(self) -> None:
        super().__init__((OPEN,))

    def _read_unlisted(self) -> bool:
        self._state = self._read_head
        return True

    def _read_head(self) -> bool:
        head = _HEAD.match(self._rest)
        if head is None:
            maybe = _MAYBE_HEAD.fullmatch(self._rest) is not None and len(self._rest) < MAX_HEAD_CHARACTERS
            return False if maybe else self._give_up()
        self._rest = self._rest[head.end() :]
        return self._start_call(head[1])
