"""Parses YAML into plain data with the position of every key and list item, for error messages.

The parser is stricter than YAML 1.1: duplicate keys, keys that are not text and custom tags are faults. Dates stay
text. Anchors and merge keys (`<<: *base`) work, within bounds on depth and size.

`load` parses the text into YAML nodes in C (libyaml), and `_Builder` turns the nodes into data and positions. If the
rest of the text stays readable after a fault, the fault is added to `LocatedYaml.faults`. A syntax error raises
`InvalidYaml`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from gateway.policy import Path

MAX_DEPTH = 40
MAX_NODES = 500_000  # counted with aliases expanded: ten lines of aliases can expand to a billion values

_MERGE = "tag:yaml.org,2002:merge"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_BOOL = "tag:yaml.org,2002:bool"


class Position(NamedTuple):
    """Position in the text; both numbers count from 1."""

    line: int
    column: int


START = Position(1, 1)


class YamlFault(NamedTuple):
    """A problem in the YAML text: its position, the path of the value, and a message."""

    position: Position
    path: Path
    message: str


class InvalidYaml(Exception):
    """The text cannot be parsed beyond the fault."""

    def __init__(self, fault: YamlFault) -> None:
        super().__init__(fault.message)
        self.fault = fault


@dataclass
class LocatedYaml:
    """Parsed data with positions. `data` is complete except for the values that `faults` names."""

    data: Any = None
    positions: dict[Path, Position] = field(default_factory=dict)
    faults: list[YamlFault] = field(default_factory=list)

    def position(self, path: Path) -> Position:
        """Return the position of the key or list item at `path`, or of its nearest ancestor that the file contains."""
        while path and path not in self.positions:
            path = path[:-1]
        return self.positions.get(path, START)


def load(text: str) -> LocatedYaml:
    """Parse one YAML document. Raises `InvalidYaml`."""
    try:
        _bound_depth(text)
        loader = _Loader(text)
        root = loader.get_single_node()
        located = LocatedYaml()
        if root is not None:
            located.data = _Builder(loader, located).build(root, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        words = ", ".join(part for part in (error.context, error.problem) if part)
        raise InvalidYaml(YamlFault(_position(mark) if mark else START, (), words)) from None
    except yaml.reader.ReaderError as error:
        before = text.encode()[: error.position].decode(errors="replace")
        position = Position(before.count("\n") + 1, len(before) - before.rfind("\n"))
        raise InvalidYaml(YamlFault(position, (), error.reason)) from None
    return located


def compose(text: str) -> yaml.Node | None:
    """The nodes of a text that `load` has parsed, with their marks. For edits of the text (`edit.py`)."""
    node: yaml.Node | None = _Loader(text).get_single_node()
    return node


class _Loader(yaml.CSafeLoader):
    pass


# No date: `version: 2026-11-20` is a name that looks like one, and dates in a policy are parsed from text.
# Booleans as in YAML 1.2, only true and false: in YAML 1.1 the word in `scope: off` would be a boolean, too.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_TIMESTAMP, _BOOL)]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def _position(mark: Any) -> Position:
    return Position(mark.line + 1, mark.column + 1)


def _bound_depth(text: str) -> None:
    """Raise `InvalidYaml` for deep nesting, before libyaml recurses in C, where a stack overflow kills the process."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise InvalidYaml(
                    YamlFault(_position(event.start_mark), (), f"nested more than {MAX_DEPTH} levels deep")
                )
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


class _Builder:
    """Turns YAML nodes into data and records their positions and faults."""

    def __init__(self, loader: _Loader, located: LocatedYaml) -> None:
        self._loader = loader
        self._located = located
        self._nodes_left = MAX_NODES

    def build(self, node: yaml.Node, path: Path) -> Any:
        self._nodes_left -= 1
        if self._nodes_left < 0 or len(path) > MAX_DEPTH:  # also ends an alias that contains itself
            raise InvalidYaml(
                YamlFault(_position(node.start_mark), (), "too large or too deeply nested with its aliases expanded")
            )
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._item(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, path)

    def _item(self, node: yaml.Node, path: Path) -> Any:
        self._located.positions[path] = _position(node.start_mark)
        return self.build(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged = {**self._merged(value_node, path), **merged}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self._scalar(key_node, path) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                self._fault(key_node, path, "a key must be text: put quotes around it")
            elif key in own:
                first = self._located.positions[(*path, key)].line
                self._fault(key_node, (*path, key), f"duplicate key; first used in line {first}")
            else:
                self._located.positions[(*path, key)] = _position(key_node.start_mark)
                own[key] = self.build(value_node, (*path, key))
        return {**merged, **own}

    def _merged(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        """Return the keys that `<<:` merges from a mapping or a list of mappings. Earlier mappings win."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Any] = {}
        for source in sources:
            if isinstance(source, yaml.MappingNode):
                merged = {**self._mapping(source, path), **merged}
            else:
                self._fault(source, path, "<<: must be a mapping or a list of mappings")
        return merged

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        try:
            return self._loader.construct_object(node)
        except yaml.constructor.ConstructorError:
            self._fault(node, path, f"unsupported tag {node.tag}")
        except ValueError:
            self._fault(node, path, f"is not a valid {node.tag.rpartition(':')[2]}")

    def _fault(self, node: yaml.Node, path: Path, message: str) -> None:
        self._located.faults.append(YamlFault(_position(node.start_mark), path, message))


__all__ = ["START", "InvalidYaml", "LocatedYaml", "Position", "YamlFault", "compose", "load"]
