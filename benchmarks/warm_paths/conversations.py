"""Conversations to replay, and the cached tokens that an infinite cache would reach on them.

The recorded ones are tau-bench's airline sessions: several turns of a customer, an agent and its tools. If there is no
recording, conversations of the same shape are generated.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("WARMPATH_SHARED", ROOT.parent / "shared"))
TRACE = SHARED / "traces" / "taubench_gpt-4o-airline.json"
BLOCK_TOKENS = 16  # block size of the engines
CHARACTERS_MAX = 24_000  # length of a conversation's JSON: some 8,000 tokens of the demo model

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A tenant's conversation. Each of its requests has all messages before one of the assistant's."""

    tenant: str
    messages: tuple[Message, ...]

    def turns(self) -> Iterator[list[Message]]:
        for i, message in enumerate(self.messages):
            if message["role"] == "assistant" and i:
                yield list(self.messages[:i])


def conversations(count: int, seed: int) -> tuple[str, list[Conversation]]:
    """The name of the source, and `count` conversations in random order. Each task is a tenant.

    The longest ones are skipped, since a small cache must be able to hold each conversation completely.
    """
    if TRACE.exists():
        sessions = [(f"t{session['task_id']}", session["traj"]) for session in json.loads(TRACE.read_bytes())]
        source = TRACE.name
    else:
        sessions = [(f"t{i % 50}", _generated(i)) for i in range(200)]
        source = "generated"
    sessions = [session for session in sessions if len(json.dumps(session[1])) <= CHARACTERS_MAX]
    random.Random(seed).shuffle(sessions)
    return source, [Conversation(tenant, tuple(messages)) for tenant, messages in sessions[:count]]


def _generated(number: int) -> list[Message]:
    rng = random.Random(number)

    def text(words: int) -> str:
        return " ".join("".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(words))

    messages: list[Message] = [{"role": "system", "content": text(1000)}]
    for _ in range(rng.randint(6, 16)):
        messages.append({"role": "user", "content": text(rng.randint(5, 120))})
        messages.append({"role": "assistant", "content": text(rng.randint(10, 60))})
    return messages


class InfiniteCache:
    """A prefix cache that never evicts: holds all full blocks of every tenant, separately."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def serve(self, tenant: str, token_ids: Sequence[int]) -> int:
        """The number of the prompt's tokens that are cached. Stores the prompt. The last token is never cached."""
        cached = 0
        digest = tenant.encode()
        for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
            block = json.dumps(token_ids[end - BLOCK_TOKENS : end]).encode()
            digest = hashlib.sha256(digest + block).digest()
            if digest in self._digests and cached == end - BLOCK_TOKENS and end < len(token_ids):
                cached = end
            self._digests.add(digest)
        return cached
