"""P3 transform `tool_order`: sorts tools by name.

Clients that collect tools from several servers send them in the order in which the servers answered. The order is
visible in the prompt, and models are not quite indifferent to it, so the policy must name this transform. Tools of one
name keep their order.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from gateway.core.cache_breakpoints import FIELD_JSON
from gateway.prompts.transforms.base import Safety, TransformContext, ValueTransform

_list = msgspec.json.Decoder(list[msgspec.Raw])
_any = msgspec.json.Decoder()


class ToolOrder(ValueTransform):
    """Sorts tools by name."""

    name: ClassVar[str] = "tool_order"
    safety: ClassVar[Safety] = Safety.P3
    fields: ClassVar[tuple[str, ...]] = ("tools", "functions")

    def apply(self, raw: bytes, context: TransformContext) -> bytes | None:
        if FIELD_JSON in raw:  # the order decides which tools a cache breakpoint covers
            return None
        tools = [bytes(tool) for tool in _list.decode(raw)]
        in_order = sorted(tools, key=lambda tool: tool_name(_any.decode(tool)))
        return None if in_order == tools else b"[" + b",".join(in_order) + b"]"


def tool_name(tool: Any) -> str:
    """The name of a tool in any dialect; "" if it has none."""
    if not isinstance(tool, dict):
        return ""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return name if isinstance(name, str) else ""
