"""Tool calls of DeepSeek V3, R1 and V3.1, in a section between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`.

V3 and R1 write the arguments in a fenced block of JSON after the name, and V3.1 writes them right after the separator:

    <｜tool▁call▁begin｜>function<｜tool▁sep｜>name\\n```json\\n{...}\\n```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>

The parser reads both forms. The grammar of a format allows its own form only.
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

SECTION_OPENS, SECTION_CLOSES = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_OPENS, SEPARATOR, CALL_CLOSES = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE_OPENS, FENCE_CLOSES = "\n```json\n", "\n```"


class DeepSeekFormat(ToolFormat):
    """Format of DeepSeek's calls. `fenced`: the arguments are in a fenced block, as V3 and R1 write them."""

    markers = (SECTION_OPENS, SECTION_CLOSES, CALL_OPENS, SEPARATOR, CALL_CLOSES)
    begins = SECTION_OPENS

    def __init__(self, *, fenced: bool) -> None:
        self._fenced = fenced

    def parser(self, tools: Sequence[CallableTool]) -> OutputParser:
        return DeepSeekParser()

    def calls(self, tools: Sequence[CallableTool], terminal: MarkerTerminal, *, parallel: bool) -> str:
        newline = r'"\n" ' if self._fenced else ""
        more = f" ({newline}call){{0,{MAX_PARALLEL_CALLS - 1}}}" if parallel else ""
        call = " | ".join(f"call_{i}" for i in range(len(tools)))
        rules = [
            f"head: {terminal(SECTION_OPENS)}",
            f"calls: call{more} {terminal(SECTION_CLOSES)}",
            f"call: {terminal(CALL_OPENS)} ({call}) {terminal(CALL_CLOSES)}",
        ]
        for i, tool in enumerate(tools):
            if self._fenced:
                name = f'"function" {terminal(SEPARATOR)} {quoted(tool.name + FENCE_OPENS)}'
                rules.append(f"call_{i}: {name} arguments_{i} {quoted(FENCE_CLOSES)}")
            else:
                rules.append(f"call_{i}: {quoted(tool.name)} {terminal(SEPARATOR)} arguments_{i}")
            rules.append(f"arguments_{i}: {parameters_rule(tool)}")
        return "\n".join(rules)


class DeepSeekParser(SectionedCallParser):
    """Parser of one output. Reads calls of V3 and R1, and calls of V3.1."""

    section_opens, section_closes, call_opens = SECTION_OPENS, SECTION_CLOSES, CALL_OPENS
    closings = ("```", CALL_CLOSES)
    head = re.compile(
        rf"\s*(?:function{SEPARATOR}([^\s<]+)\s*```(?:json)?\s*|([^\s<]+){SEPARATOR}\s*(?:```(?:json)?\s*)?)(?=\{{)"
    )
