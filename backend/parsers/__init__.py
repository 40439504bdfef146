"""What is text, reasoning and tool calls in a model's answer: one file per format, chosen once per server."""

from __future__ import annotations

from backend.parsers.base import ToolFormat
from backend.parsers.harmony import Harmony, HarmonyChannels
from backend.parsers.hermes import Hermes
from backend.parsers.llama3 import Llama3
from backend.parsers.mistral import Mistral
from backend.parsers.reasoning import ReasoningFormat
from backend.parsers.thinking import ThinkingFormat

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": Hermes(),
    "llama3": Llama3(),
    "mistral": Mistral(),
    "harmony": Harmony(),
}
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "think": ThinkingFormat("<think>", "</think>"),
    "mistral": ThinkingFormat("[THINK]", "[/THINK]"),
    "harmony": HarmonyChannels(),
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
