"""Adds canonicalisation exceptions to a policy file and leaves all other bytes of the file as they are.

An edit inserts text at the positions that the YAML parser reports, so comments, blank lines, quotes and indentation
stay. Serializing the data, even with a parser that keeps comments, would change the layout of other lines. Whether the
edit did what it should is not left to the positions: the new text is parsed, and must have the old data with the
exceptions added, and be a valid policy. Otherwise nothing is written, and the error has the line to add by hand. So it
is if `canonicalise` comes from an anchor that other parts use, too.

A new exception comes first, since the first that matches decides. An exception for just the same tenant and models is
changed in place. The file is replaced atomically, and not if it has changed since it was read.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import msgspec
import yaml

from gateway.policy import Check, Policy, located_yaml
from gateway.policy.file import PolicyError, content_digest, parse_policy, read_policy

SECTION, LIST = "canonicalise", "exceptions"
_UNSET: dict[str, Any] = {"opt_in": [], "template_date": None}  # the defaults of what an exception may set besides
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*(?: [A-Za-z0-9_./-]+)*")
_BOM = b"\xef\xbb\xbf"

ExceptionFields = Mapping[str, Any]


class PolicyEditError(Exception):
    """The policy file cannot be edited or written. The message says why, and what to do."""


class PolicyEdit(msgspec.Struct, frozen=True):
    """A valid change of a policy file that is not written yet."""

    path: FilePath
    old: bytes
    new: bytes
    policy: Policy  # of the new content

    @property
    def digest(self) -> str:
        """Identifies the content that is changed."""
        return content_digest(self.old)

    def diff(self, *, context_lines: int = 3) -> str:
        """The change as a unified diff."""
        before, after = (content.decode("utf-8-sig").splitlines(keepends=True) for content in (self.old, self.new))
        lines = difflib.unified_diff(before, after, str(self.path), str(self.path), n=context_lines)
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    def write(self) -> None:
        """Replace the file. Raises `PolicyEditError` if it has changed meanwhile or cannot be written."""
        target = self.path.resolve()  # a link stays a link
        if read_policy(target) != self.old:
            raise PolicyEditError(f"{self.path} has changed since it was read; review the change again")
        try:
            _replace(target, self.new)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise PolicyEditError(
                f"{self.path} cannot be written: {reason}; apply the change where the file comes from"
            ) from None


def edit_policy(path: FilePath, exceptions: Sequence[ExceptionFields], *, checks: Sequence[Check] = ()) -> PolicyEdit:
    """The change that adds these exceptions to a policy file. Writes nothing.

    Raises `PolicyError` if the file is not a valid policy, before or after the change, and `PolicyEditError` if the
    change cannot be made in this file.
    """
    old = read_policy(path)
    parse_policy(old, file=str(path), checks=checks)
    text = old.decode("utf-8-sig")
    for exception in reversed(exceptions):  # each comes before the ones added earlier
        text = _with_exception(text, exception)
    new = (_BOM if old.startswith(_BOM) else b"") + text.encode()
    return PolicyEdit(path, old, new, parse_policy(new, file=str(path), checks=checks))


def exception_fields(
    tenant: str, models: Sequence[str], level: str, opt_in: Sequence[str], template_date: str | None
) -> dict[str, Any]:
    """An exception as data of the policy file, without what has its default."""
    fields: dict[str, Any] = {
        "tenant": tenant,
        "model": models[0] if len(models) == 1 else list(models),
        "level": level,
    }
    if opt_in:
        fields["opt_in"] = list(opt_in)
    if template_date is not None:
        fields["template_date"] = template_date
    return fields


def exception_line(exception: ExceptionFields, *, as_json: bool = False) -> str:
    """An exception as one line of YAML, or of JSON."""
    return json.dumps(exception, ensure_ascii=False) if as_json else _flow(exception)


def _with_exception(text: str, exception: ExceptionFields) -> str:
    before = located_yaml.load(text).data
    after = _expected(before, exception)
    if after == before:
        return text
    root = located_yaml.compose(text)
    assert isinstance(root, yaml.MappingNode), "a valid policy is a mapping"
    edited = _edited(text, root, before, exception)
    try:
        located = located_yaml.load(edited)
        is_expected = located.data == after and not located.faults
    except located_yaml.InvalidYaml:
        is_expected = False
    if not is_expected:
        line = exception_line(exception)
        raise PolicyEditError(f"the layout of `{SECTION}` cannot be edited; add to its `{LIST}`, as the first: {line}")
    return edited


def _expected(data: Any, exception: ExceptionFields) -> Any:
    """The data of the policy with the exception."""
    data = copy.deepcopy(data)
    exceptions = data.setdefault(SECTION, {}).setdefault(LIST, [])
    place = _same_scope(exceptions, exception)
    if place is None:
        exceptions.insert(0, dict(exception))
    else:
        exceptions[place].update(_changes(exceptions[place], exception))
    return data


def _edited(text: str, root: yaml.MappingNode, data: Any, exception: ExceptionFields) -> str:
    as_json = bool(root.flow_style) and bool(root.value) and root.value[0][0].style == '"'
    line = exception_line(exception, as_json=as_json)
    section = _value_of(root, SECTION)
    if not isinstance(section, yaml.MappingNode):
        return _with_key(text, root, SECTION, [(LIST, line)], as_json)
    listed = _value_of(section, LIST)
    if not isinstance(listed, yaml.SequenceNode):
        return _with_key(text, section, LIST, [(None, line)], as_json)
    place = _same_scope(data[SECTION][LIST], exception)
    if place is None:
        return _with_first_item(text, section, listed, line)
    for name, value in _changes(data[SECTION][LIST][place], exception).items():
        item = _item_at(text, place)
        text = _with_value(
            text, item, name, json.dumps(value, ensure_ascii=False) if as_json else _flow(value), as_json
        )
    return text


def _same_scope(exceptions: Sequence[Any], exception: ExceptionFields) -> int | None:
    """The index of the first exception for just the same tenants and models."""
    scope = _scope(exception)
    return next((i for i, other in enumerate(exceptions) if _scope(other) == scope), None)


def _scope(exception: ExceptionFields) -> list[Any]:
    names = (exception.get(field) for field in ("tenant", "model"))
    return [sorted([each] if isinstance(each, str) else each) if each is not None else None for each in names]


def _changes(old: ExceptionFields, new: ExceptionFields) -> dict[str, Any]:
    """The fields of an exception to set, so that it says what the new one says."""
    wanted = {**{name: value for name, value in _UNSET.items() if name in old}, **new}
    return {name: value for name, value in wanted.items() if name not in ("tenant", "model") and old.get(name) != value}


def _item_at(text: str, place: int) -> yaml.MappingNode:
    node = located_yaml.compose(text)
    for key in (SECTION, LIST):
        assert isinstance(node, yaml.MappingNode)
        node = _value_of(node, key)
    assert isinstance(node, yaml.SequenceNode)
    item: yaml.MappingNode = node.value[place]
    return item


def _with_key(
    text: str, mapping: yaml.MappingNode, key: str, content: Sequence[tuple[str | None, str]], as_json: bool
) -> str:
    """The text with a new key at the end of a mapping: a list of one line, below another key if `content` names it."""
    ((inner, line),) = content
    if mapping.flow_style:
        value = f"[{line}]" if inner is None else f"{{{_key(inner, as_json)}: [{line}]}}"
        return _with_value(text, mapping, key, value, as_json)
    indent = " " * mapping.value[0][0].start_mark.column
    lines = [f"{indent}{key}:", f"{indent}  - {line}"]
    if inner is not None:
        lines[1:] = [f"{indent}  {inner}:", f"{indent}    - {line}"]
    return _with_lines(text, _end_of(mapping), lines)


def _with_value(text: str, mapping: yaml.MappingNode, key: str, value: str, as_json: bool) -> str:
    """The text with a key of a mapping set to a value of one line."""
    old = _value_of(mapping, key)
    if old is not None:
        return text[: old.start_mark.index] + value + text[_end_of(old) :]
    if not mapping.flow_style:
        indent = " " * mapping.value[0][0].start_mark.column
        return _with_lines(text, _end_of(mapping), [f"{indent}{key}: {value}"])
    entry = f"{_key(key, as_json)}: {value}"
    if not mapping.value:
        at = mapping.start_mark.index + 1
        return text[:at] + entry + text[at:]
    at = _end_of(mapping.value[-1][1])
    return f"{text[:at]}, {entry}{text[at:]}"


def _with_first_item(text: str, section: yaml.MappingNode, listed: yaml.SequenceNode, line: str) -> str:
    if listed.flow_style:
        at = listed.start_mark.index + 1
        return text[:at] + line + (", " if listed.value else "") + text[at:]
    key = next(key for key, value in section.value if value is listed)
    return _with_lines(text, key.end_mark.index, [f"{' ' * listed.start_mark.column}- {line}"])


def _with_lines(text: str, at: int, lines: Sequence[str]) -> str:
    """The text with lines below the line of this position."""
    newline = "\r\n" if "\r\n" in text else "\n"
    if text[at - 1 : at] != "\n":
        end = text.find("\n", at)
        if end < 0:
            text += newline
            end = len(text) - 1
        at = end + 1
    return text[:at] + "".join(f"{line}{newline}" for line in lines) + text[at:]


def _end_of(node: yaml.Node) -> int:
    """Where a node's text ends. The parser's mark of a block is behind the comments and blank lines that follow it."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return _end_of(node.value[-1][1])
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return _end_of(node.value[-1])
    return int(node.end_mark.index)


def _value_of(mapping: yaml.MappingNode, key: str) -> yaml.Node | None:
    return next((value for name, value in mapping.value if name.value == key), None)


def _key(name: str, as_json: bool) -> str:
    return json.dumps(name) if as_json else name


def _flow(value: Any) -> str:
    """A value in YAML's flow style. Text is quoted unless it reads as itself."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_flow(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and located_yaml.load(value).data == value:
        return value
    return json.dumps(value, ensure_ascii=False)


def _replace(target: FilePath, content: bytes) -> None:
    """Write the content to a new file with the same owner and mode, and rename it to the old one's name."""
    status = target.stat()
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), status.st_mode & 0o7777)
            with contextlib.suppress(PermissionError):  # another owner than this process; the mode is what matters
                os.fchown(file.fileno(), status.st_uid, status.st_gid)
            os.fsync(file.fileno())
        FilePath(name).replace(target)
    except BaseException:
        FilePath(name).unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # some file systems cannot; then only a power failure could undo the change
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


__all__ = ["PolicyEdit", "PolicyEditError", "PolicyError", "edit_policy", "exception_fields", "exception_line"]
