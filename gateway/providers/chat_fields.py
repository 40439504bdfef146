"""Changes of a chat's fields for servers with OpenAI's API."""

from __future__ import annotations

import msgspec

THINKING_BLOCKS = "thinking_blocks"  # field of a message's thinking with Anthropic's signature

_raw = msgspec.json.Encoder()
_messages = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_stream_options = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)


def without_thinking_blocks(messages: msgspec.Raw) -> msgspec.Raw:
    """Return the messages without `thinking_blocks`, Anthropic's signed thinking.

    Compatible servers reject or misread the field. `reasoning_content` also has the text of the thinking, and stays.
    """
    if THINKING_BLOCKS.encode() not in bytes(messages):
        return messages
    decoded = _messages.decode(messages)
    for message in decoded:
        message.pop(THINKING_BLOCKS, None)
    return msgspec.Raw(_raw.encode(decoded))


def with_stream_options(options: msgspec.Raw | None, **ours: msgspec.Raw) -> msgspec.Raw:
    """Add options to the client's `stream_options`. A value that is no object stays, so the deployment rejects it."""
    try:
        decoded = _stream_options.decode(options) if options is not None else None
    except msgspec.DecodeError:
        assert options is not None
        return options
    return msgspec.Raw(_raw.encode({**(decoded or {}), **ours}))
