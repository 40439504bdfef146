"""Tools and the choice among them, as a chat has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from gateway.doors.responses.reading import ABSENT, read, type_of, unsupported

Json = dict[str, Any]


class FunctionTool(msgspec.Struct):
    name: str
    type: str = "function"
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    strict: bool | None = None
    defer_loading: Literal[False] | None = None


class NamedTool(msgspec.Struct):
    name: str
    type: str = "function"


class AllowedTools(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[msgspec.Raw]
    type: str = "allowed_tools"


class Tools(msgspec.Struct, frozen=True):
    """As the model is to have them: `offered` are all of them, and `choice` is what the client has said of them."""

    offered: tuple[FunctionTool, ...]
    choice: str | NamedTool | AllowedTools | None

    @property
    def chat_fields(self) -> Json:
        """Only some may be allowed: a chat offers just those then, and means the same."""
        if not self.offered:
            return {}
        if isinstance(self.choice, AllowedTools):
            names = {read(NamedTool, tool, "tool_choice.tools").name for tool in self.choice.tools}
            allowed = [tool for tool in self.offered if tool.name in names]
            return {"tools": [*map(_chat_tool, allowed)], "tool_choice": self.choice.mode}
        fields: Json = {"tools": [*map(_chat_tool, self.offered)]}
        if isinstance(self.choice, NamedTool):
            fields["tool_choice"] = {"type": "function", "function": {"name": self.choice.name}}
        elif self.choice is not None:
            fields["tool_choice"] = self.choice
        return fields

    @property
    def told(self) -> list[Json]:
        """As a response says them: all that a function may have, also where the client has left it out."""
        return [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.strict,
            }
            for tool in self.offered
        ]


def read_tools(tools: Sequence[msgspec.Raw], choice: msgspec.Raw) -> Tools:
    """Raises `BadRequest`."""
    read_ones = Tools(tuple(_function(tool, f"tools[{i}]") for i, tool in enumerate(tools)), _choice(choice))
    _check_choice(read_ones)
    return read_ones


def _function(tool: msgspec.Raw, path: str) -> FunctionTool:
    kind = type_of(tool, path)
    if kind != "function":
        raise unsupported(
            f"{path}.type", f"{kind[:100]!r} is no tool of this gateway, which runs none; offer a function instead"
        )
    return read(FunctionTool, tool, path)


def _choice(choice: msgspec.Raw) -> str | NamedTool | AllowedTools | None:
    if not bytes(choice).startswith(b"{"):
        word: Any = msgspec.json.decode(choice)
        if word not in (None, "none", "auto", "required"):
            raise unsupported("tool_choice", "it must be none, auto, required or an object")
        return None if word is None else str(word)
    kind = type_of(choice, "tool_choice")
    if kind == "function":
        return read(NamedTool, choice, "tool_choice")
    if kind == "allowed_tools":
        return read(AllowedTools, choice, "tool_choice")
    raise unsupported("tool_choice.type", f"{kind[:100]!r} is neither function nor allowed_tools")


def _check_choice(tools: Tools) -> None:
    """A call that is asked for must be possible."""
    choice, known = tools.choice, {tool.name for tool in tools.offered}
    if isinstance(choice, AllowedTools):
        for number, tool in enumerate(choice.tools):
            path = f"tool_choice.tools[{number}]"
            if type_of(tool, path) != "function":
                raise unsupported(f"{path}.type", "only functions are offered here")
            _check_name(read(NamedTool, tool, path).name, known, f"{path}.name")
        if not choice.tools:
            raise unsupported("tool_choice.tools", "at least one tool must be allowed; else say none")
    elif isinstance(choice, NamedTool):
        _check_name(choice.name, known, "tool_choice.name")
    elif choice == "required" and not known:
        raise unsupported("tool_choice", "it asks for a call, and there are no tools")


def _check_name(name: str, known: set[str], path: str) -> None:
    if name not in known:
        raise unsupported(path, f"no tool has the name {name[:100]!r}")


def _chat_tool(tool: FunctionTool) -> Json:
    function: Json = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if bytes(tool.parameters) != b"null":
        function["parameters"] = tool.parameters
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}
