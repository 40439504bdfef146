"""Hooks: functions of the operator that see requests before they are sent, and answers before clients get them.

The policy lists them by `module:function`. A `before` function gets a `Request` and returns a changed body, or None. An
`after` function gets an `Answer` and returns changed texts, or None. Both may raise `Reject`. Functions may be async.
Write hooks against this module only; `runner` calls them. This package imports `gateway.routing` and what is below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class Reject(Exception):
    """Rejects the request with a status and a message that the client gets."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        if not 400 <= status < 500:
            raise ValueError(f"status must be 4xx, not {status}")
        self.message = message
        self.status = status


@dataclass(frozen=True)
class Request:
    """A request as the client sent it. `body` is its JSON, and belongs to the hook, which may change it in place."""

    call_id: str
    tenant: str
    key_id: str
    endpoint: str  # the path below /v1/, as in chat/completions, messages or responses
    model: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """A complete answer. `texts` has the text of each choice: no reasoning, and no arguments of tool calls."""

    call_id: str
    tenant: str
    key_id: str
    model: str
    deployment: str
    texts: Sequence[str]


__all__ = ["Answer", "Reject", "Request"]
