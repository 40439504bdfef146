"""Finds the session and the conversation to which a call belongs, from the names that its client sent."""

from __future__ import annotations

from gateway.prompts.matching import Headers
from gateway.prompts.reader import CommonFields

SESSION_HEADERS = (b"x-session-id", b"x-claude-code-session-id", b"session-id", b"session_id", b"x-session-affinity")
MAX_SESSION_CHARACTERS = 200  # of a session's name; further characters do not count


def session_of(common: CommonFields, headers: Headers, salt: str) -> str | None:
    """The client's session name, prefixed with the salt so that equal names of different tenants differ."""
    if common.prompt_cache_key:
        return f"{salt}:{common.prompt_cache_key[:MAX_SESSION_CHARACTERS]}"
    for header in SESSION_HEADERS:
        if header in headers:
            return f"{salt}:{headers[header][:MAX_SESSION_CHARACTERS].decode('latin-1')}"
    return None


def conversation_of(common: CommonFields, headers: Headers, salt: str) -> str:
    """The call's session, or else its end user. Empty if the client named neither."""
    return session_of(common, headers, salt) or common.safety_identifier or common.user or ""
