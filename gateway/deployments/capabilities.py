"""Capabilities that a deployment lacks: combinations of features that it answered with 501 or "not supported".

The features of a call are its operation, the kinds of content in its messages, and the fields that ask for more than
plain text. If a deployment does not support a call, the combination of the call's features is remembered for
`MISSING_SECONDS`. Calls that have all of these features go to other deployments first. They are still sent here if no
other deployment is left, and a call that is answered removes the combinations that it contains. So a wrong entry, for
example because a server's error message quotes a client's text, costs other calls at most their order of deployments.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from gateway.types import Call

MISSING_SECONDS = 600.0
COMBINATIONS_MAX = 32  # for each deployment
FEATURES_MAX = 16  # of one call; a longer combination is not remembered

# Fields that every server supports, or that do not change what the server must be able to do.
_PLAIN_FIELDS = frozenset(
    {"model", "messages", "prompt", "input", "stream", "stream_options", "max_tokens", "max_completion_tokens",
     "temperature", "top_p", "seed", "stop", "user", "safety_identifier", "metadata", "store", "service_tier",
     "prompt_cache_key", "frequency_penalty", "presence_penalty"}
)  # fmt: skip
_PLAIN_VALUES = frozenset({b"null", b"false", b"[]", b"{}", b'{"type":"text"}', b'"none"', b'"auto"', b"1", b"0"})


class _Message(msgspec.Struct):
    content: Any = None


_messages = msgspec.json.Decoder(list[_Message]).decode


def features_of(call: Call) -> frozenset[str]:
    """The operation and the features of a call beyond plain text."""
    if call.passed is not None:
        return frozenset({call.endpoint_name})
    features = {call.operation.value}
    for name in call.fields.keys() - _PLAIN_FIELDS:
        if bytes(call.fields[name]) not in _PLAIN_VALUES:
            features.add(name)
    return frozenset(features | _content_kinds(call))


def _content_kinds(call: Call) -> set[str]:
    """The kinds of content parts in the messages, other than text."""
    messages = call.fields.get("messages")
    if messages is None or b'"type"' not in bytes(messages):
        return set()
    try:
        decoded = _messages(messages)
    except (msgspec.MsgspecError, RecursionError):
        return set()
    parts = [part for message in decoded if isinstance(message.content, list) for part in message.content]
    kinds = {part.get("type") for part in parts if isinstance(part, dict)}
    return {f"content:{kind}" for kind in kinds if isinstance(kind, str) and kind != "text"}


class MissingCapabilities:
    """What one deployment does not support. Owned by the event loop; times are event-loop seconds."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until: OrderedDict[frozenset[str], float] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._until)

    def add(self, call: Call, now: float) -> None:
        """The deployment does not support this call."""
        features = features_of(call)
        if len(features) <= FEATURES_MAX:
            self._until[features] = now + MISSING_SECONDS
            self._until.move_to_end(features)
            while len(self._until) > COMBINATIONS_MAX:
                self._until.popitem(last=False)

    def answered(self, call: Call) -> None:
        """The deployment answered this call, so it supports all of its features. Free if nothing is missing."""
        if self._until:
            features = features_of(call)
            for combination in [each for each in self._until if each <= features]:
                del self._until[combination]

    def affect(self, features: frozenset[str], now: float) -> bool:
        """Whether a call with these features is probably not supported."""
        return any(combination <= features and now < until for combination, until in self._until.items())

    def clear(self) -> None:
        """The deployment's configuration changed."""
        self._until.clear()
