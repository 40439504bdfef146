"""How far an upstream request has come. A client that leaves before anything was sent owes nothing.

`gateway.routing.attempt_runner` sets what follows the requests of its task, and the HTTP transport reports to it.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol


class RequestProgress(Protocol):
    """Interface of what follows one upstream request."""

    unsent: bool  # the request waits for a connection: no byte of it has been sent


class _Unfollowed:
    unsent = False


REQUEST_PROGRESS: ContextVar[RequestProgress] = ContextVar("request_progress", default=_Unfollowed())  # noqa: B039
"""Follows the upstream requests that the current task sends."""
