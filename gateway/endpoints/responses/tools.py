"""Translates the tools and the tool choice of a Responses API request to chat."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from gateway.endpoints.responses.custom_tools import CustomTool, chat_function
from gateway.endpoints.responses.loaded_tools import TOOL_SEARCH, LoadedTool, ToolSearchTool, search_function
from gateway.endpoints.responses.strict_json import ABSENT, read, type_of, unsupported
from gateway.policy.hosted_tools import HostedToolAction, action_for

Json = dict[str, Any]
NO_HOSTED_TOOLS: Mapping[str, HostedToolAction] = MappingProxyType({})
CLIENT_TOOLS = ("function", "custom")  # types of tools that the client runs
# The namespace of a client's own functions. Its tools are called without a namespace.
DEFAULT_NAMESPACE = "functions"
ToolKind = Literal["function", "custom", "tool_search"]


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the client runs."""

    name: str
    type: str = "function"
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    strict: bool | None = None
    defer_loading: bool | None = None  # has no effect: every tool of the request is offered


class Namespace(msgspec.Struct, forbid_unknown_fields=True):
    """A group of functions. Chat has no namespaces, so a function's name in chat begins with its namespace."""

    name: str
    tools: list[msgspec.Raw]
    description: str
    type: str = "namespace"


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool choice that demands one function."""

    name: str
    type: str = "function"


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    """A tool choice that allows only some of the tools."""

    mode: Literal["auto", "required"]
    tools: list[msgspec.Raw]
    type: str = "allowed_tools"


class ToolSet(msgspec.Struct, frozen=True):
    """The tools of a request: `offered` by their names in chat, and `echo` in the form that the response repeats."""

    offered: Mapping[str, OfferedTool]
    choice: str | NamedTool | AllowedTools | None
    echo: Sequence[Json | msgspec.Raw]
    dropped: Sequence[str] = ()  # types of hosted tools that the policy drops

    @property
    def chat_fields(self) -> Json:
        """Return the chat fields `tools` and `tool_choice`, with only the allowed tools."""
        if not self.offered:
            return {}
        if isinstance(self.choice, AllowedTools):
            names = {read(NamedTool, tool, "tool_choice.tools").name for tool in self.choice.tools}
            allowed = [tool.chat for name, tool in self.offered.items() if name in names]
            return {"tools": allowed, "tool_choice": self.choice.mode}
        fields: Json = {"tools": [tool.chat for tool in self.offered.values()]}
        if isinstance(self.choice, NamedTool):
            fields["tool_choice"] = {"type": "function", "function": {"name": self.choice.name}}
        elif self.choice is not None:
            fields["tool_choice"] = self.choice
        return fields

    def kind_of(self, chat_name: str) -> ToolKind:
        """Return the client's type of the function with this name in chat."""
        tool = self.offered.get(chat_name)
        return "function" if tool is None else tool.kind

    def names_of(self, chat_name: str) -> Json:
        """Return the client's name and namespace for the function with the name `chat_name` in chat."""
        tool = self.offered.get(chat_name)
        if tool is None or tool.namespace is None:
            return {"name": chat_name}
        return {"name": tool.name, "namespace": tool.namespace}


class OfferedTool(msgspec.Struct, frozen=True):
    """A function with the client's name for it, and as a chat tool."""

    name: str
    namespace: str | None
    chat: Json
    kind: ToolKind = "function"


def name_in_chat(name: str, namespace: str | None) -> str:
    """Return a function's name in chat, which begins with its namespace if it has one."""
    return name if namespace in (None, DEFAULT_NAMESPACE) else f"{namespace}__{name}"


def read_tools(
    tools: Sequence[msgspec.Raw],
    choice: msgspec.Raw,
    hosted: Mapping[str, HostedToolAction] = NO_HOSTED_TOOLS,
    loaded: Iterable[LoadedTool] = (),
) -> ToolSet:
    """Read a request's tools and tool choice. Raises `BadRequest` if one is invalid or the chosen tool is missing.

    `hosted` says which tools are dropped because only a vendor's own servers can run them. `loaded` are the tools of
    the input. A tool that is loaded again replaces the earlier one.
    """
    dropped: list[str] = []
    offered: dict[str, OfferedTool] = {}
    echo: list[Json | msgspec.Raw] = []
    for number, tool in enumerate(tools):
        if (echoed := _add(offered, tool, f"tools[{number}]", hosted, dropped)) is not None:
            echo.append(echoed)
    for tool, path in loaded:
        found: dict[str, OfferedTool] = {}
        _add(found, tool, path, hosted, dropped)
        offered |= found
    tool_set = ToolSet(offered, _choice(choice), echo, dropped)
    _check_choice(tool_set)
    return tool_set


def _add(
    offered: dict[str, OfferedTool],
    tool: msgspec.Raw,
    path: str,
    hosted: Mapping[str, HostedToolAction],
    dropped: list[str],
) -> Json | msgspec.Raw | None:
    """Add a tool, and return it as the response repeats it, or None if it was dropped."""
    kind = type_of(tool, path)
    if kind == "function":
        function = read(FunctionTool, tool, path)
        _add_function(offered, function, None, path)
        return _echo(function)
    if kind == "namespace":
        _add_namespace(offered, read(Namespace, tool, path), path)
    elif kind == "custom":
        _add_custom(offered, read(CustomTool, tool, path), None, path)
    elif kind == TOOL_SEARCH:
        search = read(ToolSearchTool, tool, path)
        if search.execution == "server":  # there is nothing to search for, because all tools are offered
            dropped.append(kind)
            return None
        _check_new(offered, TOOL_SEARCH, path)
        offered[TOOL_SEARCH] = OfferedTool(TOOL_SEARCH, None, search_function(search), kind="tool_search")
    elif action_for(hosted, kind) == "drop":
        dropped.append(kind)
        return None
    else:
        raise unsupported(f"{path}.type", f"the tool {kind[:100]!r} is not supported; omit it, or offer a function")
    return tool


def _check_new(offered: Mapping[str, OfferedTool], name: str, path: str) -> None:
    if name in offered:
        raise unsupported(f"{path}.name", f"two tools have the name {name[:100]!r}")


def _add_namespace(offered: dict[str, OfferedTool], namespace: Namespace, path: str) -> None:
    """Add the functions of a namespace. The namespace's description is put before that of its first function."""
    for number, tool in enumerate(namespace.tools):
        tool_path = f"{path}.tools[{number}]"
        kind = type_of(tool, tool_path)
        if kind == "custom":
            _add_custom(offered, read(CustomTool, tool, tool_path), namespace.name, tool_path)
            continue
        if kind != "function":
            raise unsupported(f"{tool_path}.type", "only functions and custom tools are supported here")
        function = read(FunctionTool, tool, tool_path)
        if number == 0 and namespace.description:
            function.description = f"{namespace.description}\n\n{function.description or ''}".rstrip()
        _add_function(offered, function, namespace.name, tool_path)


def _add_function(offered: dict[str, OfferedTool], function: FunctionTool, namespace: str | None, path: str) -> None:
    name = name_in_chat(function.name, namespace)
    _check_new(offered, name, path)
    offered[name] = OfferedTool(function.name, _returned(namespace), _chat_tool(function, name))


def _add_custom(offered: dict[str, OfferedTool], tool: CustomTool, namespace: str | None, path: str) -> None:
    name = name_in_chat(tool.name, namespace)
    _check_new(offered, name, path)
    offered[name] = OfferedTool(tool.name, _returned(namespace), chat_function(tool, name, path), kind="custom")


def _returned(namespace: str | None) -> str | None:
    """Return the namespace that a call has in the response."""
    return None if namespace == DEFAULT_NAMESPACE else namespace


def _echo(function: FunctionTool) -> Json:
    """Return a function as the response repeats it, including the fields that the client omitted."""
    return {
        "type": "function",
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
        "strict": function.strict,
    }


def _choice(choice: msgspec.Raw) -> str | NamedTool | AllowedTools | None:
    if not bytes(choice).startswith(b"{"):
        value: Any = msgspec.json.decode(choice)
        if value not in (None, "none", "auto", "required"):
            raise unsupported("tool_choice", "must be none, auto, required or an object")
        return None if value is None else str(value)
    kind = type_of(choice, "tool_choice")
    if kind in CLIENT_TOOLS:
        return read(NamedTool, choice, "tool_choice")
    if kind == "allowed_tools":
        return read(AllowedTools, choice, "tool_choice")
    raise unsupported("tool_choice.type", f"must be function or allowed_tools, not {kind[:100]!r}")


def _check_choice(tools: ToolSet) -> None:
    """Raise `BadRequest` if the choice names a tool that is not offered, or demands a call without tools."""
    choice, known = tools.choice, tools.offered.keys()
    if isinstance(choice, AllowedTools):
        for number, tool in enumerate(choice.tools):
            path = f"tool_choice.tools[{number}]"
            if type_of(tool, path) not in CLIENT_TOOLS:
                raise unsupported(f"{path}.type", "only functions are supported here")
            _check_name(read(NamedTool, tool, path).name, known, f"{path}.name")
        if not choice.tools:
            raise unsupported("tool_choice.tools", "must have at least one tool; use tool_choice none instead")
    elif isinstance(choice, NamedTool):
        _check_name(choice.name, known, "tool_choice.name")
    elif choice == "required" and not known:
        raise unsupported("tool_choice", "required needs at least one tool")


def _check_name(name: str, known: Collection[str], path: str) -> None:
    if name not in known:
        raise unsupported(path, f"no tool has the name {name[:100]!r}")


def _chat_tool(tool: FunctionTool, name: str) -> Json:
    function: Json = {"name": name}
    if tool.description is not None:
        function["description"] = tool.description
    if bytes(tool.parameters) != b"null":
        function["parameters"] = tool.parameters
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}
