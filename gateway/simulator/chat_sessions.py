"""Sessions recorded as chats: what was said, of which every answer was one request with all that stands before it.

Lengths are estimates, and prefixes are those of the text, as the gateway's own door and fingerprint have them.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec

from gateway.core.errors import BadRequest
from gateway.endpoints.chat import ChatEndpoint
from gateway.prefix.fingerprint import BYTES_PER_TOKEN, FingerprintCache
from gateway.prompts.reader import read_fields

SEED = 0
SAID_UNDER = ("traj", "messages")  # the names of a session's messages: tau-bench's, and everybody's
ASSISTANT = "assistant"


class MessagesError(ValueError):
    """What is no such session; says the number of the session, from 0."""


class ChatSessionReader:
    """Reads sessions of one trace: equal prefixes have equal blocks in all of them."""

    def __init__(self) -> None:
        self._door = ChatEndpoint()
        self._fingerprints = FingerprintCache()
        self._blocks: dict[int, int] = {}  # small numbers for hashes, so that blocks that follow each other are a range
        self._new = count()

    def of(self, number: int, session: Any) -> list[tuple[int, int, tuple[range, ...]]]:
        """Of each request: tokens of prompt and answer, and the prompt's blocks. Raises `MessagesError`."""
        said = next((session[name] for name in SAID_UNDER if isinstance(session, dict) and name in session), None)
        if not isinstance(said, list) or not all(isinstance(message, dict) for message in said):
            raise MessagesError(f"session {number}: a list of messages is needed under {' or '.join(SAID_UNDER)}")
        pieces = self._pieces(number, said)
        ends = [end for end, message in enumerate(said) if end and message.get("role") == ASSISTANT]
        return [
            (
                max(1, sum(map(len, pieces[:end])) // BYTES_PER_TOKEN),
                max(1, len(pieces[end]) // BYTES_PER_TOKEN),
                self._ranges(self._fingerprints.fingerprint(pieces[:end], SEED)),
            )
            for end in ends
        ]

    def _pieces(self, number: int, said: list[Any]) -> tuple[bytes, ...]:
        body = msgspec.json.encode({"model": "", "messages": said})
        try:
            return self._door.read(read_fields(body), body).pieces
        except BadRequest as problem:
            raise MessagesError(f"session {number}: {problem}") from None

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
