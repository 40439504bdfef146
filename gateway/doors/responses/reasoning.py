"""Reasoning on its way to a client and back.

It stands in an item's `content`, in plain. A client that keeps no answers, and reads no reasoning, asks for
`reasoning.encrypted_content` and sends that back instead; here it is the same text in an envelope. There is no secret
to be kept from whoever has just been given it, and what comes back is believed no more than any other input.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "wp1."


def sealed(text: str) -> str:
    return _MARK + base64.urlsafe_b64encode(text.encode("utf-8", "surrogatepass")).decode()


def unsealed(content: str) -> str | None:
    """None of what was not sealed here: nobody here can read it."""
    if not content.startswith(_MARK):
        return None
    try:
        return base64.b64decode(content.removeprefix(_MARK), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
