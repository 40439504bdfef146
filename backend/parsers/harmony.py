"""Parsers of Harmony, the output format of gpt-oss: an output is a sequence of messages, each in a channel.

Reasoning is in channel `analysis`, tool calls are in channel `commentary`, and the content is in channel `final`.
Source: OpenAI's description of its harmony response format. An example:

    <|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.now
    <|constrain|>json<|message|>{}<|call|>

Two chained parsers read an output. `HarmonyChannelParser` splits the output into messages. It emits tool calls as
content and writes their headers in one normalised form. `HarmonyCallParser` reads the calls in this form.
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
MAX_HEADER_CHARACTERS = 512  # a longer header without a message counts as content

# Text with which a header begins. The first header has no role, because the prompt ends with the role.
_BEGINS = (START, CHANNEL, " to=")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_MESSAGE_END = re.compile("|".join([*map(re.escape, (END, CALL, RETURN)), f"(?={re.escape(START)})"]))
_CALL_HEADER = re.compile(rf"([^\s<]+)\s*(?:{re.escape(CONSTRAIN)})?\s*\w*\s*{re.escape(MESSAGE)}")


class HarmonyReasoningFormat(ReasoningFormat):
    """Format of reasoning in Harmony's channel `analysis`."""

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
    """Splits the messages of an output into reasoning and content. The content still contains the tool calls.

    The parser is a state machine whose states are methods, like `MarkerCallParser`.
    """

    def __init__(self) -> None:
        self._state: Callable[[], bool] = self._read_header
        self._make_event: Callable[[str], OutputEvent] = ContentText
        self._is_call = False
        self._rest = ""  # not consumed yet
        self._events: list[OutputEvent] = []

    @property
    def is_reasoning(self) -> bool:
        return self._make_event is ReasoningText

    def push(self, text: str) -> list[OutputEvent]:
        self._rest += text
        while self._rest and self._state():
            pass
        return self._take_events()

    def finish(self) -> list[OutputEvent]:
        if self._state != self._read_header:
            self._emit_text(self._rest)
        elif not _can_begin_header(self._rest):
            self._events.append(ContentText(self._rest))
        self._rest = ""
        return self._take_events()

    def _read_header(self) -> bool:
        if not _can_begin_header(self._rest):
            self._make_event, self._state = ContentText, self._read_plain  # the model does not follow the format
            return True
        header, found, after = self._rest.partition(MESSAGE)
        if not found:
            if len(header) > MAX_HEADER_CHARACTERS:
                self._make_event, self._state = ContentText, self._read_plain
            return len(header) > MAX_HEADER_CHARACTERS
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._is_call = recipient is not None
        self._make_event = ReasoningText if channel and channel[1] == ANALYSIS and not recipient else ContentText
        if recipient:
            # Models order channel and recipient differently; HarmonyCallParser reads this one form.
            self._emit_text(f"{TO_FUNCTION}{recipient[1]} {CONSTRAIN}json{MESSAGE}")
        self._rest, self._state = after, self._read_message
        return True

    def _read_message(self) -> bool:
        end = _MESSAGE_END.search(self._rest)
        if end is None:
            sure = len(self._rest) - max(
                partial_marker_length(self._rest, closer) for closer in (END, CALL, RETURN, START)
            )
            self._emit_text(self._rest[:sure])
            self._rest = self._rest[sure:]
            return False
        self._emit_text(self._rest[: end.start()] + (CALL if self._is_call else ""))
        self._rest, self._state = self._rest[end.end() :], self._read_header
        return True

    def _read_plain(self) -> bool:
        self._emit_text(self._rest)
        self._rest = ""
        return False

    def _emit_text(self, text: str) -> None:
        if text:
            self._events.append(self._make_event(text))

    def _take_events(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return events


def _can_begin_header(text: str) -> bool:
    return any(text.startswith(begin) or begin.startswith(text) for begin in _BEGINS)


class HarmonyFormat(ToolFormat):
    """Format of tool calls in Harmony's channel `commentary`.

    An output has one call at most, because `<|call|>` ends the output.
    """

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
    """Reads the tool calls in the content that `HarmonyChannelParser` emits. Their headers are normalised."""

    openings = (TO_FUNCTION,)

    def __init__(self) -> None:
        super().__init__()
        self._has_arguments = False

    def finish(self) -> list[OutputEvent]:
        if self._state == self._read_arguments:
            self._rest = ""  # the beginning of a marker
            self._close_call()
        return super().finish()

    def _after_marker(self) -> bool:
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
        self._emit_arguments(before[:end])
        self._rest = after if found else before[end:]
        if found:
            self._close_call()
        return bool(found)

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._has_arguments = True
            self._emit([ToolCallArguments(self._num_calls - 1, text)])

    def _close_call(self) -> None:
        if not self._has_arguments:
            self._emit_arguments("{}")
        self._state = self._after_call

    def _after_call(self) -> bool:
        self._state = self._read_text
        return True
