"""Tool calls of Kimi K2, in a section between `<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`.

    <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>

The text before the arguments is the call's id. Its last part is the number of the call in the conversation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from backend.parsers.base import (
    MAX_PARALLEL_CALLS,
    CallableTool,
    MarkerTerminal,
    OutputParser,
    ToolFormat,
    parameters_rule,
    quoted,
)
from backend.parsers.sectioned_calls import SectionedCallParser

SECTION_OPENS, SECTION_CLOSES = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_OPENS, ARGUMENTS, CALL_CLOSES = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class KimiFormat(ToolFormat):
    """Format of calls whose ids contain name and number."""

    markers = (SECTION_OPENS, SECTION_CLOSES, CALL_OPENS, ARGUMENTS, CALL_CLOSES)
    begins = SECTION_OPENS

    def parser(self, tools: Sequence[CallableTool]) -> OutputParser:
        return KimiParser()

    def calls(self, tools: Sequence[CallableTool], terminal: MarkerTerminal, *, parallel: bool) -> str:
        call = " | ".join(f"call_{i}" for i in range(len(tools)))
        rules = [
            f"head: {terminal(SECTION_OPENS)}",
            f"calls: call{f'{{1,{MAX_PARALLEL_CALLS}}}' if parallel else ''} {terminal(SECTION_CLOSES)}",
            f"call: {terminal(CALL_OPENS)} ({call}) {terminal(CALL_CLOSES)}",
            "NUMBER: /:[0-9]{1,4}/",
        ]
        for i, tool in enumerate(tools):
            rules.append(f"call_{i}: {quoted(f'functions.{tool.name}')} NUMBER {terminal(ARGUMENTS)} arguments_{i}")
            rules.append(f"arguments_{i}: {parameters_rule(tool)}")
        return "\n".join(rules)

    def new_id(self, name: str, number: int) -> str:
        return f"functions.{name}:{number}"  # the chat template writes ids in this form before the arguments


class KimiParser(SectionedCallParser):
    """Parser of one output with calls whose ids contain name and number."""

    section_opens, section_closes, call_opens = SECTION_OPENS, SECTION_CLOSES, CALL_OPENS
    closings = (CALL_CLOSES,)
    head = re.compile(rf"\s*(?:functions\.)?([\w.\-]+?)(?::\d+)?\s*{re.escape(ARGUMENTS)}\s*(?=\{{)")
