"""A policy as YAML text for people, without secrets, and the difference of two policies.

The text has the values in force that differ from their defaults. Hashes of keys, values of headers and queries,
arguments of commands, and users, passwords and queries of URLs are replaced by a mark that changes if the value does.
Marks can be compared within one process only, so that they do not confirm a guess.
"""

from __future__ import annotations

import difflib
import hashlib
import hmac
import json
import secrets
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import yaml

from gateway.policy.policy import Policy

MARK_DIGITS = 6
MAX_DIFF_LINES = 2000
CONTEXT_LINES = 3
_HIDDEN_MAPPINGS = frozenset(("headers", "query"))

_process_key = secrets.token_bytes(32)


def redacted_text(policy: Policy) -> str:
    """The policy as YAML, without secrets."""
    content = policy.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return yaml.safe_dump(_redacted(content), sort_keys=False, allow_unicode=True, width=120)


def policy_diff(before: Policy, after: Policy) -> list[str]:
    """The lines of a unified diff of two policies, without secrets. Empty if only defaults are written differently."""
    lines = list(
        difflib.unified_diff(
            redacted_text(before).splitlines(), redacted_text(after).splitlines(),
            before.hash, after.hash, lineterm="", n=CONTEXT_LINES,
        )
    )  # fmt: skip
    more = len(lines) - MAX_DIFF_LINES
    return lines if more <= 0 else [*lines[:MAX_DIFF_LINES], f"and {more} more lines"]


def _redacted(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        if key in _HIDDEN_MAPPINGS:
            return {name: each if _is_secret_source(each) else _mark(each) for name, each in value.items()}
        return {name: _redacted(each, name) for name, each in value.items()}
    if isinstance(value, list):
        if key == "command" and value:
            return [value[0], *(_mark(each) for each in value[1:])]
        return [_redacted(each, key) for each in value]
    if isinstance(value, str):
        if key == "hash":
            return _mark(value)
        if "://" in value:
            return _without_credentials(value)
    return value


def _is_secret_source(value: Any) -> bool:
    """True for `{env: NAME}` and `{file: NAME}`, which say where a secret is."""
    return isinstance(value, dict) and value.keys() <= {"env", "file"}


def _without_credentials(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return _mark(url)
    host = parts.netloc.rpartition("@")[2]
    user = f"{_mark(parts.netloc)}@" if "@" in parts.netloc else ""
    return urlunsplit((parts.scheme, user + host, parts.path, _mark(parts.query) if parts.query else "", ""))


def _mark(value: Any) -> str:
    content = json.dumps(value, sort_keys=True).encode()
    return f"(hidden {hmac.new(_process_key, content, hashlib.sha256).hexdigest()[:MARK_DIGITS]})"
