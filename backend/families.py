"""A family's table of names: "module:Class" strings, imported when one is asked for and not before."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def load_member(table: Mapping[str, str], name: str) -> Any:
    """The class behind `name`. Raises KeyError for a name that is not in the table."""
    module, _, attribute = table[name].partition(":")
    return getattr(import_module(module), attribute)
