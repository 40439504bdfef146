"""Adds CORS to the clients' endpoints, if the policy names origins. Starlette implements the protocol."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from gateway.policy.cors import CORS

METHODS = ("GET", "POST", "DELETE")


def with_cors(app: ASGIApp, cors: CORS) -> ASGIApp:
    """Return the application, wrapped so that pages of these origins may call it. Unchanged if there are none.

    Cookies are never involved: the key is in a header, which a page must know.
    """
    if not cors.origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(cors.origins),
        allow_methods=list(METHODS),
        allow_headers=["*"],
        expose_headers=["*"],
        max_age=int(cors.max_age),
    )
