"""Anthropic's tools that the client runs: bash, text editor and memory, as functions for models of any vendor.

Anthropic's models know these tools by their type. Other models get a description and a schema of the input, in which
the commands and their parameters have the names that clients expect (Anthropic's documentation of each tool). The
model's calls go to the client under the tool's name, as Anthropic's do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from gateway.core.errors import BadRequest
from gateway.endpoints.messages.blocks import CacheControl, with_cache_control

Json = dict[str, Any]

_PATH: Json = {"type": "string", "description": "Path of the file or directory."}
_VIEW_RANGE: Json = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "For `view` of a file: the first and the last line to show. -1 as the last line is the end.",
}
_EDITING: Json = {
    "file_text": {"type": "string", "description": "For `create`: the content of the new file."},
    "old_str": {"type": "string", "description": "For `str_replace`: the text to replace. It must occur exactly once."},
    "new_str": {"type": "string", "description": "For `str_replace`: the new text."},
    "insert_line": {
        "type": "integer",
        "description": "For `insert`: the line after which the text is inserted. 0 is the beginning of the file.",
    },
    "insert_text": {"type": "string", "description": "For `insert`: the text to insert."},
    "view_range": _VIEW_RANGE,
}  # fmt: skip
_RENAMING: Json = {
    "old_path": {"type": "string", "description": "For `rename`: the current path."},
    "new_path": {"type": "string", "description": "For `rename`: the new path."},
}


def _object(properties: Json, *required: str) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


def _commands(names: tuple[str, ...]) -> Json:
    return {"type": "string", "enum": list(names), "description": "What to do."}


class _Tool(msgspec.Struct, frozen=True):
    name: str
    description: str
    schema: Json


_BASH = _Tool(
    "bash",
    "Run a command in a bash shell. The shell keeps its state between calls: its directory, variables and files.",
    _object(
        {
            "command": {"type": "string", "description": "The command to run. Required unless `restart` is true."},
            "restart": {"type": "boolean", "description": "Start a new shell instead of running a command."},
        }
    ),
)


def _editor(name: str, *more: str) -> _Tool:
    return _Tool(
        name,
        "View, create and edit text files. `view` shows a file with line numbers, or lists a directory. `create` "
        "writes a new file. `str_replace` replaces a text that occurs once. `insert` inserts text after a line."
        + (" `undo_edit` takes back the last edit of a file." if more else ""),
        _object(
            {"command": _commands(("view", "create", "str_replace", "insert", *more)), "path": _PATH, **_EDITING},
            "command", "path",
        ),
    )  # fmt: skip


_MEMORY = _Tool(
    "memory",
    "Store and read notes in files under /memories, which remain between conversations. `view` lists a directory or "
    "shows a file, `create` writes a file, `str_replace` and `insert` edit one, `delete` removes and `rename` moves a "
    "file or directory. View /memories before you begin a task.",
    _object(
        {
            "command": _commands(("view", "create", "str_replace", "insert", "delete", "rename")),
            "path": {**_PATH, "description": "Path of the file or directory, for all commands except `rename`."},
            **_EDITING, **_RENAMING,
        },
        "command",
    ),
)  # fmt: skip
CLIENT_TOOLS: Mapping[str, _Tool] = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _editor("str_replace_editor", "undo_edit"),
    "text_editor_20250124": _editor("str_replace_editor", "undo_edit"),
    "text_editor_20250429": _editor("str_replace_based_edit_tool"),
    "text_editor_20250728": _editor("str_replace_based_edit_tool"),
    "memory_20250818": _MEMORY,
}


class _GivenTool(msgspec.Struct, forbid_unknown_fields=True):
    """The fields that a client may set. `max_characters` is how much of a file the client shows."""

    type: str
    name: str
    cache_control: CacheControl | None = None
    strict: bool | None = None
    max_characters: int | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


_given = msgspec.json.Decoder(_GivenTool).decode


def client_tool(path: str, kind: str, tool: bytes, *, with_breakpoint: bool) -> Json:
    """Return a tool of a type in `CLIENT_TOOLS` as a function of a chat. Raises `BadRequest`.

    Raises `msgspec.ValidationError` if its fields are invalid.
    """
    known, given = CLIENT_TOOLS[kind], _given(tool)
    if given.name != known.name:
        raise BadRequest(f"{path}.name: must be {known.name!r} for the type {kind!r}", param=f"{path}.name")
    function = {"name": known.name, "description": known.description, "parameters": known.schema}
    chat = {"type": "function", "function": function}
    return with_cache_control(chat, given.cache_control if with_breakpoint else None)
