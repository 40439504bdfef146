"""Custom tools of the Responses API, whose input is free text: each becomes a function with one text argument.

Chat has only functions. The grammar of a tool's input becomes part of the function's description. The arguments of a
call are JSON, so its input is known when the call is complete: a stream has it as one delta.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gateway.endpoints.responses.strict_json import ABSENT, is_given, read, unsupported

Json = dict[str, Any]
INPUT = "input"  # the function's only argument
_NO_STRUCTURE = "The input is free text."

_arguments = msgspec.json.Decoder(dict[str, Any]).decode


class CustomTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool that the client runs, and whose input is text."""

    name: str
    type: str = "custom"
    description: str | None = None
    format: msgspec.Raw = ABSENT
    defer_loading: bool | None = None  # has no effect: every tool of the request is offered
    allowed_callers: list[Literal["direct"]] | None = None


class InputFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The format of a custom tool's input: text, or a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomCallItem(msgspec.Struct, forbid_unknown_fields=True):
    """A call of a custom tool in an earlier answer."""

    type: str
    call_id: str
    name: str
    input: str
    namespace: str | None = None
    id: Any = None
    status: Any = None


def chat_function(tool: CustomTool, name: str, path: str) -> Json:
    """Return the tool as a chat tool. Raises `BadRequest` if its format is invalid."""
    parts = [tool.description] if tool.description else []
    structure = _NO_STRUCTURE
    if is_given(tool.format):
        form = read(InputFormat, tool.format, f"{path}.format")
        if form.type == "grammar":
            if form.syntax is None or form.definition is None:
                raise unsupported(f"{path}.format", "a grammar needs syntax and definition")
            structure = f"The input must match this {form.syntax} grammar:\n{form.definition}"
    parts.append(structure)
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string", "description": "The tool's complete input."}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": "\n\n".join(parts), "parameters": parameters},
    }


def input_of(arguments: str) -> str:
    """Return a call's input. Arguments in another form than the function's are the input themselves."""
    try:
        value = _arguments(arguments).get(INPUT)
    except (msgspec.MsgspecError, RecursionError):
        return arguments
    return value if isinstance(value, str) else arguments


def arguments_of(text: str) -> str:
    """Return a call's arguments for its input."""
    return msgspec.json.encode({INPUT: text}).decode()
