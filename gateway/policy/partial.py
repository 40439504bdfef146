"""Makes a valid policy of the valid parts of an invalid one, so that its other mistakes are found in the same pass.

Each wrong value is removed, and a required one is replaced. What that could hide or pretend is not reported: nothing is
made if a name was wrong to which other parts of the policy may refer.
"""

from __future__ import annotations

import copy
from typing import Any

from pydantic import ValidationError

from gateway.policy.findings import Finding, Path
from gateway.policy.policy import Policy, PolicyNameError

PASSES_MAX = 4  # removing a value can make a further one wrong
REPLACEMENTS = {  # of required fields in deployments
    "provider": "openai",
    "base_url": "http://replaced.invalid/v1",
    "model": "replaced",
}
NAMES = frozenset({"name", "aliases", "id", "classes", "deployments", "models", "tenants", "keys"})


def valid_part(data: Any, error: ValidationError) -> tuple[Policy | None, tuple[Finding, ...]]:
    """The policy without its wrong values, and what contradicts in it. None if there is none.

    `error` is what the validation of `data` raised.
    """
    data = copy.deepcopy(data)
    for _ in range(PASSES_MAX):
        for detail in error.errors(include_url=False):
            if isinstance(cause := detail.get("ctx", {}).get("error"), PolicyNameError):
                return cause.policy, cause.findings
            if detail["type"] == "too_short" and detail["input"]:
                continue  # pydantic also calls a list of invalid items too short
            if not _mend(data, detail["loc"], is_unknown_key=detail["type"] == "extra_forbidden"):
                return None, ()
        try:
            return Policy.model_validate(data), ()
        except ValidationError as further:
            error = further
    return None, ()


def _mend(data: Any, path: Path, *, is_unknown_key: bool) -> bool:
    """Replaces or removes the value at `path`, or the mapping's value that contains it. False if that is not safe."""
    if len(path) == 3 and path[0] == "deployments" and path[2] in REPLACEMENTS:
        parent = _at(data, path[:-1])
        if isinstance(parent, dict):
            parent[path[2]] = REPLACEMENTS[str(path[2])]
        return isinstance(parent, dict)
    for length in range(len(path), 0, -1):
        parent, key = _at(data, path[: length - 1]), path[length - 1]
        if isinstance(parent, dict) and key in parent:
            if not is_unknown_key and (key in NAMES or (length == 2 and path[0] == "classes")):
                return False
            del parent[key]
            return True
    return False


def _at(data: Any, path: Path) -> Any:
    """The value at a path, or None."""
    for key in path:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return None
    return data
