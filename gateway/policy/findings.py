"""Findings: the form in which the checks of a policy report a wrong value and its path."""

from __future__ import annotations

import difflib
from collections.abc import Collection

Path = tuple[str | int, ...]
"""Path to a value in a policy: keys and list indices, as in ("models", 0, "aliases", 1)."""

Finding = tuple[Path, str]
"""The path to a wrong value, and a message for the author of the policy."""


def choices(given: str, known: Collection[str]) -> str:
    """List the known names, with a suggestion if one is similar: `known: a, b; did you mean 'b'?`"""
    close = difflib.get_close_matches(given, known, n=1)
    listed = ", ".join(sorted(set(known))) or "none"
    return f"known: {listed}" + (f"; did you mean {close[0]!r}?" if close else "")
