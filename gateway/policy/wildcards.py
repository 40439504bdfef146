"""Names of models with a `*`, as in `openai/*`: one entry of the policy for all models of a vendor."""

from __future__ import annotations

from collections.abc import Collection

STAR = "*"


def star_part(pattern: str, name: str) -> str | None:
    """Return what the pattern's `*` stands for in a name. None if the name does not match or the part is empty."""
    before, star, after = pattern.partition(STAR)
    part_end = len(name) - len(after)
    if not star or part_end <= len(before) or not name.startswith(before) or not name.endswith(after):
        return None
    part = name[len(before) : part_end]
    return None if part in (".", "..") else part  # some servers have the name in the path


def names_include(names: Collection[str], name: str) -> bool:
    """Whether a name is one of the names, or matches a pattern among them."""
    return name in names or any(STAR in each and star_part(each, name) is not None for each in names)
