"""Authenticates requests that the gateway makes itself for a key: lines of batches, and the dashboard's playground.

Their key is known by its id only, since secrets are not stored.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.auth.authenticator import Authenticator, check_enabled
from gateway.core.errors import Unauthenticated
from gateway.policy import Policy
from gateway.types import Principal

KEY_ID_HEADER = b"warmpath-key-id"  # only requests that the gateway itself builds are read for this header


class KeyIdAuthenticator(Authenticator):
    """Authenticates a request by the id of its key. Rejects it if the key is not valid, or its tenant is disabled."""

    async def authenticate(self, headers: Mapping[bytes, bytes], policy: Policy) -> Principal:
        principal = await self.principal_of(headers[KEY_ID_HEADER].decode(), policy)
        if principal is None:
            raise Unauthenticated("the API key is no longer valid")
        check_enabled(principal.tenant)
        return principal
