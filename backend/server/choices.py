"""Converts the output of a chat choice to OpenAI's format, as a complete message or as stream deltas."""

from __future__ import annotations

from backend.parsers.base import ContentText, OutputEvent, ReasoningText, ToolCallArguments, ToolCallStart, ToolFormat
from backend.server.responses import Json
from backend.server.sequence import ChoiceDelta


class ChatChoice:
    """Accumulates the content, reasoning and tool calls of one chat choice from its parser's events.

    `is_named` is true if the request names the function to call. As in OpenAI's API, the finish reason is then "stop",
    not "tool_calls". `num_earlier_calls` is the number of tool calls in the request's messages.
    """

    def __init__(
        self, tools: ToolFormat | None, *, with_reasoning: bool, is_named: bool, num_earlier_calls: int
    ) -> None:
        self._tools = tools
        self._with_reasoning = with_reasoning
        self._is_named = is_named
        self._num_earlier_calls = num_earlier_calls
        self._content = ""
        self._reasoning = ""
        self._calls: list[Json] = []

    def take(self, delta: ChoiceDelta) -> list[Json]:
        """Adds a delta to the message. Returns the delta as values of the `delta` field of OpenAI's stream chunks."""
        return [body for event in delta.events for body in self._body(event)]

    def _body(self, event: OutputEvent) -> list[Json]:
        match event:
            case ContentText(text):
                self._content += text
                return [{"content": text}]
            case ReasoningText(text):
                if not self._with_reasoning:
                    return []
                self._reasoning += text
                return [_reasoning_fields(text)]
            case ToolCallStart(index, name):
                assert self._tools is not None
                function = {"name": name, "arguments": ""}
                call = {
                    "id": self._tools.new_id(name, self._num_earlier_calls + index),
                    "type": "function",
                    "function": function,
                }
                self._calls.append(call)
                return [{"tool_calls": [{"index": index, **call, "function": {**function}}]}]
            case ToolCallArguments(index, text):
                self._calls[index]["function"]["arguments"] += text
                return [{"tool_calls": [{"index": index, "function": {"arguments": text}}]}]

    @property
    def message(self) -> Json:
        """The message so far. `content` is null if there are tool calls and no text."""
        body: Json = {"content": None if self._calls and not self._content else self._content}
        if self._reasoning:
            body |= _reasoning_fields(self._reasoning)
        if self._calls:
            body["tool_calls"] = self._calls
        return body

    def finish_reason(self, reason: str | None) -> str | None:
        """Returns OpenAI's finish reason for the engine's: "tool_calls" replaces "stop" after a tool call."""
        return "tool_calls" if reason == "stop" and self._calls and not self._is_named else reason


def _reasoning_fields(text: str) -> Json:
    """Returns reasoning text under both field names: `reasoning_content` (most servers) and `reasoning` (vLLM 2026)."""
    return {"reasoning_content": text, "reasoning": text}
