"""Encodes reasoning for a client that sends it back in its next request.

Reasoning is plain text in an item's `content`. A client that stores no responses asks for
`reasoning.encrypted_content`, and sends that back. Here it is the same text in an envelope, together with what a
deployment needs back unchanged: Anthropic's signed thinking. It is not encrypted: it keeps no secret from the client,
who has the text anyway. What comes back is trusted no more than any other input, and a deployment checks its own
signatures.
"""

from __future__ import annotations

import base64
import binascii

import msgspec

_MARK = "wp1."  # tells our envelopes from those of other vendors; the number is the version


class ReasoningContent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Reasoning as text, and as the signed blocks that some deployments need back."""

    text: str = ""
    blocks: tuple[dict[str, str], ...] = ()  # `thinking_blocks` of a chat


_decoder = msgspec.json.Decoder(ReasoningContent)


def encode_reasoning(reasoning: ReasoningContent) -> str:
    """Return the value of `encrypted_content`."""
    return _MARK + base64.urlsafe_b64encode(msgspec.json.encode(reasoning)).decode()


def decode_reasoning(content: str) -> ReasoningContent | None:
    """Decode `encrypted_content`. None if it was not encoded by this gateway, and cannot be read."""
    if not content.startswith(_MARK):
        return None
    try:
        return _decoder.decode(base64.b64decode(content.removeprefix(_MARK), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        return None
