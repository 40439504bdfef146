"""Output parsers: split a model's text into content, reasoning and tool calls. Each file implements one format.

This package only processes text. It imports neither the engine nor the server, nor torch, nor tokenizers. Begin at
`base.py` for the interface. TOOL_FORMATS and REASONING_FORMATS list the values of `--tool-parser` and
`--reasoning-parser`.
"""

from __future__ import annotations

from backend.parsers.base import ToolFormat
from backend.parsers.delimited_reasoning import DelimitedReasoningFormat
from backend.parsers.harmony import HarmonyFormat, HarmonyReasoningFormat
from backend.parsers.hermes import HermesFormat
from backend.parsers.llama3 import Llama3Format
from backend.parsers.mistral import MistralFormat
from backend.parsers.reasoning import ReasoningFormat

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": HermesFormat(),
    "llama3": Llama3Format(),
    "mistral": MistralFormat(),
    "harmony": HarmonyFormat(),
}
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "think": DelimitedReasoningFormat("<think>", "</think>"),
    "mistral": DelimitedReasoningFormat("[THINK]", "[/THINK]"),
    "harmony": HarmonyReasoningFormat(),
}

AUTO, NONE = "auto", "none"
# Text in a chat template that reveals the format, because the template prints earlier calls and reasoning in it.
# The first match wins.
_TOOL_SIGNS = {
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3",
    "<|start_header_id|>": "llama3",
    "<|channel|>analysis": "harmony",
}
_REASONING_SIGNS = {"</think>": "think", "[/THINK]": "mistral", "<|channel|>analysis": "harmony"}


def tool_format(name: str, template: str) -> ToolFormat | None:
    """Returns the tool call format. `name` is a format, "auto" to detect it in the chat template, or "none"."""
    return TOOL_FORMATS.get(_detect(_TOOL_SIGNS, template) if name == AUTO else name)


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """Returns the reasoning format. `name` is a format, "auto" to detect it in the chat template, or "none"."""
    return REASONING_FORMATS.get(_detect(_REASONING_SIGNS, template) if name == AUTO else name)


def _detect(signs: dict[str, str], template: str) -> str:
    return next((name for sign, name in signs.items() if sign in template), NONE)
