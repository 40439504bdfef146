"""YAML as plain data that still knows where everything stands, for error messages that point.

Stricter than YAML itself: a key twice in one mapping, a key that is not text, and a tag of one's own are problems.
A date stays the text that it is written as. Anchors and merge keys (`<<: *base`) work as ever, within bounds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from gateway.policy import Path

MAX_DEPTH = 40
MAX_NODES = 500_000  # with aliases expanded: ten lines of them can mean a billion values

_MERGE = "tag:yaml.org,2002:merge"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_BOOL = "tag:yaml.org,2002:bool"


class Position(NamedTuple):
    line: int
    column: int


START = Position(1, 1)


class YamlFault(NamedTuple):
    position: Position
    path: Path
    message: str


class InvalidYaml(Exception):
    """The text can not be read at all, from the fault on."""

    def __init__(self, fault: YamlFault) -> None:
        super().__init__(fault.message)
        self.fault = fault


@dataclass
class LocatedYaml:
    """`data` is complete but for what `faults` names."""

    data: Any = None
    positions: dict[Path, Position] = field(default_factory=dict)
    faults: list[YamlFault] = field(default_factory=list)

    def position(self, path: Path) -> Position:
        """Of the key or the list item at `path`, or of the nearest thing around it that the file has."""
        while path and path not in self.positions:
            path = path[:-1]
        return self.positions.get(path, START)


def load(text: str) -> LocatedYaml:
    """Raises `InvalidYaml`."""
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


class _Loader(yaml.CSafeLoader):
    pass


# `version: 2026-11-20` is a name that looks like a date, and no part of a policy is a date. `off` is a word, as in
# `scope: off`: of what YAML 1.1 takes for a truth value, 1.2 has left true and false.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_TIMESTAMP, _BOOL)]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def _position(mark: Any) -> Position:
    return Position(mark.line + 1, mark.column + 1)


def _bound_depth(text: str) -> None:
    """Composing recurses in C, where a stack that runs out takes the process with it."""
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
    def __init__(self, loader: _Loader, located: LocatedYaml) -> None:
        self._loader = loader
        self._located = located
        self._nodes_left = MAX_NODES

    def build(self, node: yaml.Node, path: Path) -> Any:
        self._nodes_left -= 1
        if self._nodes_left < 0 or len(path) > MAX_DEPTH:  # an alias that holds itself ends here too
            raise InvalidYaml(
                YamlFault(_position(node.start_mark), (), "too much, or too deep, once aliases are expanded")
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
                self._fault(key_node, (*path, key), f"this key stands here twice; first in line {first}")
            else:
                self._located.positions[(*path, key)] = _position(key_node.start_mark)
                own[key] = self.build(value_node, (*path, key))
        return {**merged, **own}

    def _merged(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        """What `<<:` brings in, from one mapping or from a list of them, where earlier ones win."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Any] = {}
        for source in sources:
            if isinstance(source, yaml.MappingNode):
                merged = {**self._mapping(source, path), **merged}
            else:
                self._fault(source, path, "<<: takes a mapping, or a list of them")
        return merged

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        try:
            return self._loader.construct_object(node)
        except yaml.constructor.ConstructorError:
            self._fault(node, path, f"the tag {node.tag} means nothing here")
        except ValueError:
            self._fault(node, path, f"is no {node.tag.rpartition(':')[2]}")

    def _fault(self, node: yaml.Node, path: Path, message: str) -> None:
        self._located.faults.append(YamlFault(_position(node.start_mark), path, message))


__all__ = ["START", "InvalidYaml", "LocatedYaml", "Position", "YamlFault", "load"]
