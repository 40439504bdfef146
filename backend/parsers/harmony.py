"""gpt-oss: an answer is a row of messages, each with a channel: thoughts in `analysis`, calls in `commentary`, the
answer in `final`. Source: OpenAI's description of its harmony response format.

    <|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.now
    <|constrain|>json<|message|>{}<|call|>

Two parsers share the reading. `Channels` takes the messages apart and lets calls through, each with one and the same
header whatever the model's own looked like; `HarmonyCalls` reads these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from backend.parsers.base import (
    CallableTool,
    ContentText,
    MarkerTerminal,
    OutputEvent,
    OutputParser,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
    ToolFormat,
    parameters_rule,
    quoted,
)
from backend.parsers.marker_calls import MarkerCallParser, partial_marker_length
from backend.parsers.reasoning import ReasoningFormat, ReasoningParser, rule_through

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
ANALYSIS, FINAL = "analysis", "final"
TO_FUNCTION = f"{CHANNEL}commentary to=functions."
MAX_HEADER_CHARACTERS = 512  # what goes on longer without a message is text

_BEGINS = (START, CHANNEL, " to=")  # of a header; the prompt has written the role of the first
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_MESSAGE_END = re.compile("|".join([*map(re.escape, (END, CALL, RETURN)), f"(?={re.escape(START)})"]))
_CALL_HEADER = re.compile(rf"([^\s<]+)\s*(?:{re.escape(CONSTRAIN)})?\s*\w*\s*{re.escape(MESSAGE)}")


class HarmonyReasoningFormat(ReasoningFormat):
    @property
    def markers(self) -> tuple[str, ...]:
        return MARKERS

    def parser(self, prompt: str) -> ReasoningParser:
        return HarmonyChannelParser()

    def rules(self, prompt: str, terminal: MarkerTerminal) -> str:
        body, rule = rule_through(END, terminal)
        channel, message, start = terminal(CHANNEL), terminal(MESSAGE), terminal(START)
        return "\n".join(
            [
                f'reasoning: ({channel} "{ANALYSIS}" {message} {body} {start} "assistant")?',
                f'opening: {channel} "{FINAL}" {message}',
                rule,
            ]
        )


class HarmonyChannelParser(ReasoningParser):
    """A machine whose states are methods: each takes what it can of `_rest`, and says whether it got any further."""

    def __init__(self) -> None:
        self._state: Callable[[], bool] = self._read_header
        self._say: Callable[[str], OutputEvent] = ContentText
        self._is_call = False
        self._rest = ""  # not yet taken
        self._events: list[OutputEvent] = []

    @property
    def is_reasoning(self) -> bool:
        return self._say is ReasoningText

    def push(self, text: str) -> list[OutputEvent]:
        self._rest += text
        while self._rest and self._state():
            pass
        return self._told()

    def finish(self) -> list[OutputEvent]:
        if self._state != self._read_header:
            self._tell(self._rest)
        elif not _begins_header(self._rest):
            self._events.append(ContentText(self._rest))
        self._rest = ""
        return self._told()

    def _read_header(self) -> bool:
        if not _begins_header(self._rest):
            self._say, self._state = ContentText, self._read_plain  # a model that keeps to no format
            return True
        header, found, after = self._rest.partition(MESSAGE)
        if not found:
            if len(header) > MAX_HEADER_CHARACTERS:
                self._say, self._state = ContentText, self._read_plain
            return len(header) > MAX_HEADER_CHARACTERS
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._is_call = recipient is not None
        self._say = ReasoningText if channel and channel[1] == ANALYSIS and not recipient else ContentText
        if recipient:
            self._tell(f"{TO_FUNCTION}{recipient[1]} {CONSTRAIN}json{MESSAGE}")
        self._rest, self._state = after, self._read_message
        return True

    def _read_message(self) -> bool:
        end = _MESSAGE_END.search(self._rest)
        if end is None:
            sure = len(self._rest) - max(
                partial_marker_length(self._rest, closer) for closer in (END, CALL, RETURN, START)
            )
            self._tell(self._rest[:sure])
            self._rest = self._rest[sure:]
            return False
        self._tell(self._rest[: end.start()] + (CALL if self._is_call else ""))
        self._rest, self._state = self._rest[end.end() :], self._read_header
        return True

    def _read_plain(self) -> bool:
        self._tell(self._rest)
        self._rest = ""
        return False

    def _tell(self, text: str) -> None:
        if text:
            self._events.append(self._say(text))

    def _told(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return events


def _begins_header(text: str) -> bool:
    return any(text.startswith(begin) or begin.startswith(text) for begin in _BEGINS)


class HarmonyFormat(ToolFormat):
    """One call to an answer: the token behind it ends the answer."""

    markers = MARKERS
    begins = CHANNEL
    stands_alone = True

    def parser(self, tools: Sequence[CallableTool]) -> OutputParser:
        return HarmonyCallParser()

    def calls(self, tools: Sequence[CallableTool], terminal: MarkerTerminal, *, parallel: bool) -> str:
        rules = [f"head: {terminal(CHANNEL)}", f"calls: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
        for i, tool in enumerate(tools):
            header = (
                f'{quoted(f"commentary to=functions.{tool.name} ")} {terminal(CONSTRAIN)} "json" {terminal(MESSAGE)}'
            )
            rules += [f"call_{i}: {header} arguments_{i}", f"arguments_{i}: {parameters_rule(tool)}"]
        return "\n".join(rules)


class HarmonyCallParser(MarkerCallParser):
    marker = TO_FUNCTION

    def __init__(self) -> None:
        super().__init__()
        self._has_arguments = False

    def finish(self) -> list[OutputEvent]:
        if self._state == self._read_arguments:
            self._tell_arguments(self._rest)
            self._rest = ""
            self._close_call()
        return super().finish()

    def _behind_marker(self) -> bool:
        header = _CALL_HEADER.match(self._rest)
        if header is None:
            too_late = MESSAGE in self._rest or len(self._rest) > MAX_HEADER_CHARACTERS
            return self._give_up() if too_late else False
        self._emit([ToolCallStart(self._num_calls, header[1])])
        self._rest = self._rest[header.end() :]
        self._has_arguments, self._state = False, self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        before, found, after = self._rest.partition(CALL)
        end = len(before) if found else len(before) - partial_marker_length(before, CALL)
        self._tell_arguments(before[:end])
        self._rest = after if found else before[end:]
        if found:
            self._close_call()
        return bool(found)

    def _tell_arguments(self, text: str) -> None:
        if text:
            self._has_arguments = True
            self._emit([ToolCallArguments(self._num_calls - 1, text)])

    def _close_call(self) -> None:
        if not self._has_arguments:
            self._tell_arguments("{}")
        self._state = self._behind_call

    def _behind_call(self) -> bool:
        self._state = self._read_text
        return True
