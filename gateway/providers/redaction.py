"""Removes a deployment's API key from what leaves the gateway.

Servers and the proxies before them quote request headers in their errors. The text of such an error goes to the client,
and parts of it to logs, traces and the dashboard, so it is redacted where it enters, when the failure is made.
"""

from __future__ import annotations

import re

REDACTED = "[redacted]"
PREFIX_CHARACTERS = 12  # a server that masks a key itself shows its beginning and some stars
SECRET_CHARACTERS_MIN = 6  # shorter values would be found in ordinary words


class Redactor:
    """Replaces secrets in texts and bodies, complete or cut short after their first characters."""

    def __init__(self, *secrets: str) -> None:
        self._text: re.Pattern[str] | None = None
        self._bytes: re.Pattern[bytes] | None = None
        patterns = []
        for secret in secrets:
            if len(secret) >= SECRET_CHARACTERS_MIN:
                patterns.append(re.escape(secret))
            if len(secret) > 2 * PREFIX_CHARACTERS:
                patterns.append(re.escape(secret[:PREFIX_CHARACTERS]) + r"[\w.*+/=-]*")
        if patterns:
            pattern = "|".join(patterns)
            self._text = re.compile(pattern, re.ASCII)
            self._bytes = re.compile(pattern.encode())

    def text(self, text: str) -> str:
        return text if self._text is None else self._text.sub(REDACTED, text)

    def body(self, body: bytes) -> bytes:
        return body if self._bytes is None else self._bytes.sub(REDACTED.encode(), body)


NOTHING_SECRET = Redactor()
