"""Reads sessions recorded as chats: each answer was one request, whose prompt is everything before it.

Lengths are estimates. Prefixes are those of the text, parsed and fingerprinted by the gateway's own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec

from gateway.core.errors import BadRequest
from gateway.endpoints.chat import ChatEndpoint
from gateway.policy.media_formulas import DEFAULT
from gateway.prefix.fingerprint import BYTES_PER_TOKEN, FingerprintCache
from gateway.prompts.media.counting import count_pieces
from gateway.prompts.reader import read_fields

SEED = 0
MEDIA_FORMULAS = (DEFAULT,)  # a trace does not name a known model
MESSAGE_FIELDS = ("traj", "messages")  # the fields that may have the messages; the first one is tau-bench's
ASSISTANT = "assistant"


class MessagesError(ValueError):
    """The session is malformed. The message has the session's number, from 0."""


class ChatSessionReader:
    """Reads the sessions of one trace. Equal prefixes get equal blocks in all of them."""

    def __init__(self) -> None:
        self._endpoint = ChatEndpoint()
        self._fingerprints = FingerprintCache()
        self._blocks: dict[int, int] = {}  # a small number for each hash, so that consecutive blocks form a range
        self._new = count()

    def read_session(self, number: int, session: Any) -> list[tuple[int, int, tuple[range, ...]]]:
        """Each request of a session: tokens of the prompt, tokens of the answer, and the prompt's blocks.

        Raises `MessagesError`.
        """
        messages = next(
            (session[name] for name in MESSAGE_FIELDS if isinstance(session, dict) and name in session), None
        )
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise MessagesError(f"session {number}: a list of messages is needed under {' or '.join(MESSAGE_FIELDS)}")
        pieces = self._pieces(number, messages)
        ends = [end for end, message in enumerate(messages) if end and message.get("role") == ASSISTANT]
        return [
            (
                max(1, sum(map(len, pieces[:end])) // BYTES_PER_TOKEN),
                max(1, len(pieces[end]) // BYTES_PER_TOKEN),
                self._ranges(self._fingerprints.fingerprint(pieces[:end], SEED)),
            )
            for end in ends
        ]

    def _pieces(self, number: int, messages: list[Any]) -> Sequence[bytes]:
        body = msgspec.json.encode({"model": "", "messages": messages})
        try:
            return count_pieces(self._endpoint.read(read_fields(body), body).pieces, MEDIA_FORMULAS).texts
        except BadRequest as error:
            raise MessagesError(f"session {number}: {error}") from None

    def _ranges(self, chain: tuple[int, ...]) -> tuple[range, ...]:
        ranges: list[range] = []
        for block in chain:
            known = self._blocks.get(block)
            if known is None:
                known = self._blocks[block] = next(self._new)
            if ranges and ranges[-1].stop == known:
                ranges[-1] = range(ranges[-1].start, known + 1)
            else:
                ranges.append(range(known, known + 1))
        return tuple(ranges)
