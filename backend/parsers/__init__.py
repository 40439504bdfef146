"""What is text, reasoning and tool calls in a model's answer: one file per format, chosen once per server."""

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
# By what chat templates print when they show a model its own earlier calls and thoughts; the first that is found.
_TOOL_SIGNS = {
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3",
    "<|start_header_id|>": "llama3",
    "<|channel|>analysis": "harmony",
}
_REASONING_SIGNS = {"</think>": "think", "[/THINK]": "mistral", "<|channel|>analysis": "harmony"}


def tool_format(name: str, template: str) -> ToolFormat | None:
    """`name`: of a format, "auto" for the one that the chat template suggests, "none" for none."""
    return TOOL_FORMATS.get(_suggested(_TOOL_SIGNS, template) if name == AUTO else name)


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    return REASONING_FORMATS.get(_suggested(_REASONING_SIGNS, template) if name == AUTO else name)


def _suggested(signs: dict[str, str], template: str) -> str:
    return next((name for sign, name in signs.items() if sign in template), NONE)
