"""What is wrong with a policy, and where: the form in which every check says it."""

from __future__ import annotations

import difflib
from collections.abc import Collection

Path = tuple[str | int, ...]
"""Where something stands in a policy: keys and list indices, as in ("models", 0, "aliases", 1)."""

Finding = tuple[Path, str]
"""What is wrong, and where."""


def choices(given: str, known: Collection[str]) -> str:
    """What could have been meant: `known: a, b; did you mean 'b'?`"""
    close = difflib.get_close_matches(given, known, n=1)
    listed = ", ".join(sorted(set(known))) or "none"
    return f"known: {listed}" + (f"; did you mean {close[0]!r}?" if close else "")
