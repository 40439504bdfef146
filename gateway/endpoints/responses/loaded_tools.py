"""Tools that arrive in the input instead of in `tools`, and the search with which a client's model finds them.

A client offers the tool `tool_search` with `execution: client`. To the model it is a function. Its call becomes an item
`tool_search_call`, and the client answers with an item `tool_search_output` that has the tools it found. An item
`additional_tools` has tools without a search. All of them are offered from then on, because chat has one list of tools.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from gateway.endpoints.responses.strict_json import ABSENT, is_given, read, type_of

Json = dict[str, Any]
TOOL_SEARCH = "tool_search"
# Types of items that have tools, as they occur in JSON, so that other items need not be decoded.
_MARKS = (b'"tool_search_output"', b'"additional_tools"')
_NAMED_TYPES = ("function", "custom", "namespace")
_DESCRIPTION = "Finds further tools. The tools that it finds can be called afterwards."
_PARAMETERS: Json = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "What the tool should do."}},
    "required": ["query"],
}


class ToolSearchTool(msgspec.Struct, forbid_unknown_fields=True):
    """The tool that searches for tools. The client runs it, unless `execution` is `server`."""

    type: str = TOOL_SEARCH
    execution: Literal["client", "server"] = "server"
    description: str | None = None
    parameters: msgspec.Raw = ABSENT


class ToolSearchCallItem(msgspec.Struct, forbid_unknown_fields=True):
    """A search of an earlier answer."""

    type: str
    call_id: str
    arguments: msgspec.Raw
    execution: Literal["client"] = "client"
    id: Any = None
    status: Any = None


class ToolSearchOutputItem(msgspec.Struct, forbid_unknown_fields=True):
    """The tools that the client found."""

    type: str
    call_id: str
    tools: list[msgspec.Raw]
    execution: Literal["client"] = "client"
    id: Any = None
    status: Any = None


class AdditionalToolsItem(msgspec.Struct, forbid_unknown_fields=True):
    """Tools that are available from here on."""

    type: str
    tools: list[msgspec.Raw]
    role: Literal["developer"] = "developer"
    id: Any = None


class LoadedTool(NamedTuple):
    """A tool of an item, and its path in the body."""

    tool: msgspec.Raw
    path: str


class _Named(msgspec.Struct):
    """The names in a function, a custom tool or a namespace."""

    name: str
    tools: list[_Named] = []


def loaded_tools(items: Sequence[msgspec.Raw], first: int = 0) -> Iterator[LoadedTool]:
    """Yield the tools of all items that have some. `first` is the number of the first item. Raises `BadRequest`."""
    for number, item in enumerate(items, start=first):
        if not any(mark in bytes(item) for mark in _MARKS):
            continue
        path = f"input[{number}]"
        kind = type_of(item, path, default="message")
        if kind == "additional_tools":
            tools = read(AdditionalToolsItem, item, path).tools
        elif kind == "tool_search_output":
            tools = read(ToolSearchOutputItem, item, path).tools
        else:
            continue
        for position, tool in enumerate(tools):
            yield LoadedTool(tool, f"{path}.tools[{position}]")


def search_function(tool: ToolSearchTool) -> Json:
    """Return the search as a chat tool."""
    parameters = tool.parameters if is_given(tool.parameters) else _PARAMETERS
    function = {"name": TOOL_SEARCH, "description": tool.description or _DESCRIPTION, "parameters": parameters}
    return {"type": "function", "function": function}


def result_text(output: ToolSearchOutputItem, path: str) -> str:
    """Return what the model reads as the result of a search. It gets the tools' definitions with the next request.

    Tools that only a vendor's servers can run are not named, because the model does not get them.
    """
    found = []
    for position, tool in enumerate(output.tools):
        where = f"{path}.tools[{position}]"
        if type_of(tool, where) in _NAMED_TYPES:
            found.append(read(_Named, tool, where))
    names = [f"{tool.name}.{inner.name}" for tool in found for inner in tool.tools]
    names += [tool.name for tool in found if not tool.tools]
    return f"These tools are available now: {', '.join(names)}." if names else "No tools found."
