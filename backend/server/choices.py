"""A chat's choice on the wire, from what its parser reads: content, reasoning and tool calls, whole or as deltas."""

from __future__ import annotations

from backend.parsers.base import ContentText, OutputEvent, ReasoningText, ToolCallArguments, ToolCallStart, ToolFormat
from backend.server.responses import Json
from backend.server.sequence import ChoiceDelta


class ChatChoice:
    """`is_named`: the client has named the function to call, which by OpenAI's rule ends an answer with "stop"."""

    def __init__(self, tools: ToolFormat | None, *, with_reasoning: bool, is_named: bool) -> None:
        self._tools = tools
        self._with_reasoning = with_reasoning
        self._is_named = is_named
        self._content = ""
        self._reasoning = ""
        self._calls: list[Json] = []

    def take(self, delta: ChoiceDelta) -> list[Json]:
        """What the client of a stream is told of it: bodies of OpenAI's `delta`."""
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
                return [_thought(text)]
            case ToolCallStart(index, name):
                assert self._tools is not None
                function = {"name": name, "arguments": ""}
                call = {"id": self._tools.new_id(), "type": "function", "function": function}
                self._calls.append(call)
                return [{"tool_calls": [{"index": index, **call, "function": {**function}}]}]
            case ToolCallArguments(index, text):
                self._calls[index]["function"]["arguments"] += text
                return [{"tool_calls": [{"index": index, "function": {"arguments": text}}]}]

    @property
    def message(self) -> Json:
        body: Json = {"content": None if self._calls and not self._content else self._content}
        if self._reasoning:
            body |= _thought(self._reasoning)
        if self._calls:
            body["tool_calls"] = self._calls
        return body

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._calls and not self._is_named else reason


def _thought(text: str) -> Json:
    """Under the name that most servers give it, and under that which vLLM does since 2026."""
    return {"reasoning_content": text, "reasoning": text}
