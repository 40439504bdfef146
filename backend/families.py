"""Families of implementations: tables from names to "module:Class" strings, which are imported on first use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def load_member(table: Mapping[str, str], name: str) -> Any:
    """Imports and returns the class with this name. Raises KeyError if the table does not have it."""
    module, _, attribute = table[name].partition(":")
    return getattr(import_module(module), attribute)
