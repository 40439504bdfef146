"""The transforms by policy level. A level applies all of its transforms, in this order, to every request alike."""

from gateway.canonical.base import Fields, Transform
from gateway.canonical.text_parts import TextParts

LEVELS: dict[str, tuple[Transform, ...]] = {
    "off": (),
    "safe": (TextParts(),),
}


def canonical_form(fields: Fields, level: str) -> tuple[Fields, tuple[str, ...]]:
    """The body in its canonical form, and the names of the transforms that changed something."""
    applied: list[str] = []
    for transform in LEVELS[level]:
        changed = transform.apply(fields)
        if changed is not None:
            fields = changed
            applied.append(transform.name)
    return fields, tuple(applied)


__all__ = ["LEVELS", "canonical_form"]
