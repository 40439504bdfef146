"""Encodes reasoning for a client that sends it back in its next request.

Reasoning is plain text in an item's `content`. A client of a gateway that stores no responses requests
`reasoning.encrypted_content`, and sends that value back. The value has the same text, and Anthropic's signed thinking,
which the deployment needs back unchanged. Despite the field's name, the value is not encrypted, because the client has
the text anyway. A returned value is trusted no more than any other input, and a deployment checks its own signatures.
"""

from __future__ import annotations

import base64
import binascii

import msgspec

_MARK = "wp1."  # marks values that this gateway encoded; the digit is the version


class ReasoningContent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Reasoning as text, and as the signed blocks that some deployments need back unchanged."""

    text: str = ""
    blocks: tuple[dict[str, str], ...] = ()  # `thinking_blocks` of a chat


_decoder = msgspec.json.Decoder(ReasoningContent)


def encode_reasoning(reasoning: ReasoningContent) -> str:
    """Return the value of `encrypted_content`."""
    return _MARK + base64.urlsafe_b64encode(msgspec.json.encode(reasoning)).decode()


def decode_reasoning(content: str) -> ReasoningContent | None:
    """Decode `encrypted_content`. Returns None if this gateway did not encode it, since it cannot be read then."""
    if not content.startswith(_MARK):
        return None
    try:
        return _decoder.decode(base64.b64decode(content.removeprefix(_MARK), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        return None
