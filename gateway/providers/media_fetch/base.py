"""Interface of what fetches media by URL, for the phases that send calls."""

from __future__ import annotations

from typing import Protocol

from gateway.types import Call


class MediaSource(Protocol):
    """Fetches media that requests give by URL, as far as the policy of a call allows it."""

    async def with_data(self, call: Call, kinds: frozenset[str]) -> Call:
        """Return the call with data instead of the URLs of these types of content parts.

        Takes a bounded time. Raises `ProviderFailure` with the fault `UNSUPPORTED` if a medium cannot be fetched.
        """
