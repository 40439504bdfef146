"""Requests that pass to a deployment as they came, except for the model's name."""

from __future__ import annotations

import msgspec


class PassedRequest(msgspec.Struct, frozen=True):
    """A request whose body passes to the deployment as it came, except for the model's name."""

    name: str  # the client's path without /v1/
    path: str  # below the server's root
    content_type: str
    body_bytes: int
    stream: bool = False  # the client asked for a stream of events
    form: tuple[bytes, bytes] | None = None  # before and after the model's name; None if the body is JSON
