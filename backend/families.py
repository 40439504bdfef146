"""Loads an implementation by name from a table of "module:Class" strings. Its module is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def load_member(table: Mapping[str, str], name: str) -> Any:
    """Imports and returns the class that the table lists under this name. Raises KeyError if it lists none."""
    module, _, attribute = table[name].partition(":")
    return getattr(import_module(module), attribute)
