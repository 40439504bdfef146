"""Output parsers: split a model's text into content, reasoning and tool calls. Each file implements one format.

This package only processes text. It imports neither the engine nor the server, nor torch, nor tokenizers. Begin at
`base.py` for the interface. TOOL_FORMATS and REASONING_FORMATS list the values of `--tool-parser` and
`--reasoning-parser`.
"""

from __future__ import annotations

from backend.parsers.base import ToolFormat
from backend.parsers.deepseek import DeepSeekFormat
from backend.parsers.delimited_reasoning import DelimitedReasoningFormat
from backend.parsers.glm import GlmFormat
from backend.parsers.harmony import HarmonyFormat, HarmonyReasoningFormat
from backend.parsers.hermes import HermesFormat
from backend.parsers.json_list import JsonListFormat
from backend.parsers.kimi import KimiFormat
from backend.parsers.llama3 import Llama3Format
from backend.parsers.mistral import MistralFormat
from backend.parsers.pythonic import PythonicFormat
from backend.parsers.qwen3_coder import Qwen3CoderFormat
from backend.parsers.reasoning import ReasoningFormat

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": HermesFormat(),
    "llama3": Llama3Format(),
    "mistral": MistralFormat(),
    "harmony": HarmonyFormat(),
    "qwen3_coder": Qwen3CoderFormat(),
    "glm": GlmFormat(),
    "deepseek_v3": DeepSeekFormat(fenced=True),
    "deepseek_v31": DeepSeekFormat(fenced=False),
    "kimi": KimiFormat(),
    "granite": JsonListFormat("<|tool_call|>", "<tool_call>"),
    "phi4": JsonListFormat("<|tool_call|>", "functools", closing="<|/tool_call|>"),
    "pythonic": PythonicFormat(),
}
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "think": DelimitedReasoningFormat("<think>", "</think>"),
    "mistral": DelimitedReasoningFormat("[THINK]", "[/THINK]"),
    "harmony": HarmonyReasoningFormat(),
}

AUTO, NONE = "auto", "none"
# Texts in a chat template that reveal the format, because the template prints earlier calls and reasoning in it, or
# describes it to the model. The first line of which a template contains all texts applies.
_TOOL_SIGNS: dict[tuple[str, ...], str] = {
    ("<function=", "<parameter="): "qwen3_coder",
    ("<tool_call>", "<arg_key>"): "glm",
    ("<|/tool|>",): "phi4",
    ("functools[",): "phi4",
    ("<|tool_call|>",): "granite",
    ("<tool_call>",): "hermes",
    ("[TOOL_CALLS]",): "mistral",
    ("<｜tool▁sep｜>", "```json"): "deepseek_v3",
    ("<｜tool▁sep｜>",): "deepseek_v31",
    ("<|tool_call_argument_begin|>",): "kimi",
    ("[func_name1(",): "pythonic",
    ("<|python_tag|>",): "llama3",
    ("<|start_header_id|>",): "llama3",
    ("<|channel|>analysis",): "harmony",
}
_REASONING_SIGNS: dict[tuple[str, ...], str] = {
    ("</think>",): "think",
    ("[/THINK]",): "mistral",
    ("<|channel|>analysis",): "harmony",
}


def tool_format(name: str, template: str) -> ToolFormat | None:
    """Returns the tool call format. `name` is a format, "auto" to detect it in the chat template, or "none"."""
    return TOOL_FORMATS.get(_detect(_TOOL_SIGNS, template) if name == AUTO else name)


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """Returns the reasoning format. `name` is a format, "auto" to detect it in the chat template, or "none"."""
    return REASONING_FORMATS.get(_detect(_REASONING_SIGNS, template) if name == AUTO else name)


def _detect(signs: dict[tuple[str, ...], str], template: str) -> str:
    return next((name for texts, name in signs.items() if all(text in template for text in texts)), NONE)
