"""Reasoning on its way to a client and back.

It stands in an item's `content`, in plain. A client that keeps no answers asks for `reasoning.encrypted_content`, and
sends that back; here it is the same text in an envelope, and with it what a server wants to have back as it gave it:
Anthropic's signed thinking. There is no secret to be kept from whoever has just been given it, and what comes back is
believed no more than any other input: a server checks its own signatures.
"""

from __future__ import annotations

import base64
import binascii

import msgspec

_MARK = "wp1."


class Thought(msgspec.Struct, frozen=True, omit_defaults=True):
    text: str = ""
    blocks: tuple[dict[str, str], ...] = ()  # `thinking_blocks` of a chat


_decoder = msgspec.json.Decoder(Thought)


def sealed(thought: Thought) -> str:
    return _MARK + base64.urlsafe_b64encode(msgspec.json.encode(thought)).decode()


def unsealed(content: str) -> Thought | None:
    """None of what was not sealed here: nobody here can read it."""
    if not content.startswith(_MARK):
        return None
    try:
        return _decoder.decode(base64.b64decode(content.removeprefix(_MARK), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        return None
