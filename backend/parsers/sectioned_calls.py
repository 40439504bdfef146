"""Base of tool call formats with a section of calls, in which markers precede the name and the arguments of each call.

DeepSeek and Kimi write such calls: section marker, call marker, name, separator, arguments in JSON, end marker.
"""

from __future__ import annotations

import re
from typing import ClassVar

from backend.parsers.marker_calls import MarkerCallParser

MAX_HEAD_CHARACTERS = 512  # between the call marker and the arguments; longer text is content


class SectionedCallParser(MarkerCallParser):
    """Parser of one output with a section of calls. Some models omit the section marker before the first call.

    A subclass sets the class variables. `head` matches the text between the call marker and the arguments, and its
    groups are forms of the name. `closings` are the texts that may follow the arguments.
    """

    section_opens: ClassVar[str]
    section_closes: ClassVar[str]
    call_opens: ClassVar[str]
    closings: ClassVar[tuple[str, ...]]
    head: ClassVar[re.Pattern[str]]

    def __init__(self) -> None:
        super().__init__()
        self.openings = (self.section_opens, self.call_opens)

    def _after_marker(self) -> bool:
        if self._opening == self.call_opens:
            self._state = self._read_head
            return True
        if not self._skip_whitespace():
            return False
        if self._rest.startswith(self.call_opens):
            self._rest = self._rest.removeprefix(self.call_opens)
            self._tentative += self.call_opens
            self._state = self._read_head
            return True
        return False if self.call_opens.startswith(self._rest) else self._give_up()

    def _read_head(self) -> bool:
        head = self.head.match(self._rest)
        if head is None:
            return False if len(self._rest) < MAX_HEAD_CHARACTERS else self._give_up()
        self._rest = self._rest[head.end() :]
        return self._start_call(next(name for name in head.groups() if name))

    def _after_call(self) -> bool:
        if not self._skip_whitespace():
            return False
        for text in (*self.closings, self.section_closes, self.call_opens):
            if self._rest.startswith(text):
                self._rest = self._rest.removeprefix(text)
                self._tentative = text if text == self.call_opens else ""
                if text == self.section_closes:
                    self._state = self._read_text
                elif text == self.call_opens:
                    self._state = self._read_head
                return True
        if any(text.startswith(self._rest) for text in (*self.closings, self.section_closes, self.call_opens)):
            return False
        return self._give_up()

    @property
    def _is_between_calls(self) -> bool:
        return super()._is_between_calls or self._state == self._read_head
