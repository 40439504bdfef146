"""Policy type of tools that only a vendor's own servers can run, such as web searches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

HostedToolAction = Literal["refuse", "drop"]
HostedTools = dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,99}$")], HostedToolAction]


def action_for(tools: Mapping[str, HostedToolAction], kind: str) -> HostedToolAction:
    """The action for a tool's type. `web_search` also means its versions, such as `web_search_20250305`."""
    matching = [name for name in tools if kind == name or kind.startswith(f"{name}_")]
    return tools[max(matching, key=len)] if matching else "refuse"
