"""Tools and the choice among them, as a chat has them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec

from gateway.endpoints.responses.reading import ABSENT, read, type_of, unsupported

Json = dict[str, Any]


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    type: str = "function"
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    strict: bool | None = None
    defer_loading: Literal[False] | None = None


class Namespace(msgspec.Struct, forbid_unknown_fields=True):
    """Functions under one name, of which a chat knows nothing: there each has both names."""

    name: str
    tools: list[msgspec.Raw]
    description: str
    type: str = "namespace"


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    type: str = "function"


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[msgspec.Raw]
    type: str = "allowed_tools"


class Tools(msgspec.Struct, frozen=True):
    """As the model is to have them: `offered` are all of them by their names in a chat, `choice` is what the client has
    said of them, and `told` how a response says them."""

    offered: Mapping[str, Offered]
    choice: str | NamedTool | AllowedTools | None
    told: Sequence[Json | msgspec.Raw]

    @property
    def chat_fields(self) -> Json:
        """Only some may be allowed: a chat offers just those then, and means the same."""
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

    def names_of(self, chat_name: str) -> Json:
        """What the client calls a function that has this name in a chat."""
        tool = self.offered.get(chat_name)
        if tool is None or tool.namespace is None:
            return {"name": chat_name}
        return {"name": tool.name, "namespace": tool.namespace}


class Offered(msgspec.Struct, frozen=True):
    name: str
    namespace: str | None
    chat: Json


def name_in_chat(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}__{name}"


def read_tools(tools: Sequence[msgspec.Raw], choice: msgspec.Raw) -> Tools:
    """Raises `BadRequest`."""
    offered: dict[str, Offered] = {}
    told: list[Json | msgspec.Raw] = []
    for number, tool in enumerate(tools):
        path = f"tools[{number}]"
        kind = type_of(tool, path)
        if kind == "function":
            function = read(FunctionTool, tool, path)
            _offer(offered, function, None, path)
            told.append(_told(function))
        elif kind == "namespace":
            _offer_all(offered, read(Namespace, tool, path), path)
            told.append(tool)
        else:
            raise unsupported(
                f"{path}.type", f"the gateway has no tool {kind[:100]!r}; leave it out, or offer a function"
            )
    chosen = Tools(offered, _choice(choice), told)
    _check_choice(chosen)
    return chosen


def _offer_all(offered: dict[str, Offered], namespace: Namespace, path: str) -> None:
    """What is said of a namespace stands before what is said of its first function."""
    for number, tool in enumerate(namespace.tools):
        place = f"{path}.tools[{number}]"
        if type_of(tool, place) != "function":
            raise unsupported(f"{place}.type", "only functions are offered here")
        function = read(FunctionTool, tool, place)
        if number == 0 and namespace.description:
            function.description = f"{namespace.description}\n\n{function.description or ''}".rstrip()
        _offer(offered, function, namespace.name, place)


def _offer(offered: dict[str, Offered], function: FunctionTool, namespace: str | None, path: str) -> None:
    name = name_in_chat(function.name, namespace)
    if name in offered:
        raise unsupported(f"{path}.name", f"there are two tools {name[:100]!r}")
    offered[name] = Offered(function.name, namespace, _chat_tool(function, name))


def _told(function: FunctionTool) -> Json:
    """All that a function may have, also where the client has left it out."""
    return {
        "type": "function",
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
        "strict": function.strict,
    }


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
    choice, known = tools.choice, tools.offered.keys()
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
