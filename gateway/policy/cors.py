"""Policy model of CORS: which web pages may call the gateway from a browser."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from gateway.policy.fields import Frozen, Names, Seconds


class CORS(Frozen):
    """Web pages that may call the gateway from a browser (Fetch standard, CORS protocol)."""

    origins: Names = Field(
        (), description="Origins of web pages, as in https://app.example.com. '*' alone: any. Default: none."
    )
    max_age: Seconds = Field(600.0, description="How long a browser may remember the answer to a preflight request.")

    @model_validator(mode="after")
    def _are_origins(self) -> Self:
        for origin in self.origins:
            scheme, separator, host = origin.partition("://")
            if origin != "*" and (scheme not in ("http", "https") or not separator or not host or "/" in host):
                raise ValueError(f"origins: {origin!r} is not an origin, as in https://app.example.com")
        return self
