"""Tool calls as models write them, in each format, for tests of parsers, grammars and the server."""

from __future__ import annotations

import json
from collections.abc import Callable

Call = tuple[str, str]
"""A function's name, and its arguments in JSON. Formats that do not write JSON need an object."""


def _each(template: str, between: str = "", before: str = "", after: str = "") -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        texts = [template.replace("NAME", name).replace("ARGS", arguments) for name, arguments in calls]
        return before + between.join(texts) + after

    return write


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _qwen3_coder(calls: list[Call]) -> str:
    def one(name: str, arguments: str) -> str:
        given = json.loads(arguments).items()
        inner = "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in given)
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _glm(calls: list[Call]) -> str:
    def one(name: str, arguments: str) -> str:
        given = json.loads(arguments).items()
        inner = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{_text(v)}</arg_value>\n" for k, v in given)
        return f"<tool_call>{name}\n{inner}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _pythonic(calls: list[Call]) -> str:
    def one(name: str, arguments: str) -> str:
        given = json.loads(arguments).items()
        return f"{name}({', '.join(f'{k}={json.dumps(v, ensure_ascii=False)}' for k, v in given)})"

    return f"[{', '.join(one(*call) for call in calls)}]"


NAMED = '{"name": "NAME", "arguments": ARGS}'
CALL, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
SECTION = {"before": "<｜tool▁calls▁begin｜>", "after": "<｜tool▁calls▁end｜>"}
WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "hermes": _each(f"<tool_call>\n{NAMED}\n</tool_call>", "\n"),
    "llama3": _each('{"name": "NAME", "parameters": ARGS}', "; "),
    "mistral": _each(NAMED, ", ", "[TOOL_CALLS][", "]"),
    "harmony": _each("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGS", "<|call|>"),
    "qwen3_coder": _qwen3_coder,
    "glm": _glm,
    "deepseek_v3": _each(f"{CALL}function{SEPARATOR}NAME\n```json\nARGS\n```<｜tool▁call▁end｜>", "\n", **SECTION),
    "deepseek_v31": _each(f"{CALL}NAME{SEPARATOR}ARGS<｜tool▁call▁end｜>", **SECTION),
    "kimi": _each(
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGS<|tool_call_end|>",
        "",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "granite": _each(NAMED, ", ", "<|tool_call|>[", "]"),
    "phi4": _each(NAMED, ", ", "<|tool_call|>[", "]<|/tool_call|>"),
    "pythonic": _pythonic,
}


def written(tools: str, *calls: Call) -> str:
    """The text of an output with these calls, in the format that TOOL_FORMATS lists under the name `tools`."""
    return WRITERS[tools]([*calls])
