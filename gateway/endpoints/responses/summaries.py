"""Encodes the summary of a compacted conversation, and translates it back to a message. See `compaction`."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

_MARK = "wpc1."  # marks summaries that this gateway encoded; the digit is the version
INTRODUCTION = "Summary of the conversation before the next message, without the messages of the user above:\n\n"


class CompactionItem(msgspec.Struct, forbid_unknown_fields=True):
    """The result of a compaction, as a client sends it back."""

    type: str
    encrypted_content: str
    id: Any = None
    created_by: Any = None
    status: Any = None


def encode_summary(summary: str) -> str:
    """Return the value of `encrypted_content`."""
    return _MARK + base64.urlsafe_b64encode(summary.encode("utf-8", "replace")).decode()


def decode_summary(content: str) -> str | None:
    """Return the summary. None if this gateway did not encode it, since it cannot be read then."""
    if not content.startswith(_MARK):
        return None
    try:
        return base64.b64decode(content.removeprefix(_MARK), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
