"""Conversations for the live comparison: lists of requests, each with its messages and the length of its answer.

Three kinds are made from recorded traffic in `../shared/traces`, or generated if there is none:

    agents    real messages with tools (tau-bench): a conversation's prompt grows by each turn; each has its own
              system prompt
    team      the same, all with the same system prompt
    coding    sessions of a coding agent, scaled down by `CODING_SCALE`: long prompts that grow, edits at their ends
    chats     a chat product's requests, scaled down by `CHATS_SCALE`: a short shared system prompt, few further turns

`coding-generated` and `chats-generated` are generated even if there are recordings.

The scaled kinds have no text, only hashes of blocks. Each block becomes a piece of text of its own, so that equal
hashes are equal text.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.warm_paths.conversations import SHARED, conversations
from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.simulator import generate
from gateway.simulator.traces import TraceSession, TrafficTrace, read_trace, staggered

GENERATED = "-generated"
KINDS = ("agents", "team", "coding", "chats", f"coding{GENERATED}", f"chats{GENERATED}")
CODING_SCALE, CHATS_SCALE = 32, 8  # a block of the trace has so many times fewer characters
CHATS_STRETCH = 500  # requests
OPENING_BLOCKS = 16  # of a chat, by which its turns are recognised: more than the common system prompt
CHARACTERS_PER_TOKEN = 3  # of the demo model's tokenizer, about
PROMPT_CHARACTERS_MAX = 24_000  # the demo model's context is 16,384 tokens
TURNS_MAX = 12  # of a coding session

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Turns:
    """One conversation: the messages of each of its requests."""

    name: str
    requests: Sequence[Messages]


def traffic(kind: str, count: int, seed: int) -> list[Turns]:
    """`count` conversations of one kind, in random order."""
    if kind in ("agents", "team"):
        _, work = conversations(count, seed)
        turns = [Turns(f"{number}", list(one.turns())) for number, one in enumerate(work)]
        return turns if kind == "team" else [_with_own_beginning(one) for one in turns]
    recorded = not kind.endswith(GENERATED)
    if kind.startswith("coding"):
        file = SHARED / "traces" / "claude_code_sessions.jsonl"
        is_read = recorded and _exists(file, kind)
        trace = read_trace(file) if is_read else generate.agents(seed, sessions=4 * count)
        return _scaled(staggered(trace, seed=seed, max_requests=TURNS_MAX), count, CODING_SCALE)
    file = SHARED / "traces" / "mooncake_conversation_trace.jsonl"
    is_read = recorded and _exists(file, kind)
    trace = read_trace(file) if is_read else generate.conversation(seed, chats=40 * count)
    return _scaled(_as_chats(trace, seed), 8 * count, CHATS_SCALE)


@lru_cache
def _exists(file: Path, kind: str) -> bool:
    """Whether there is a recording. If not, says once that this kind of traffic is generated."""
    if not file.exists():
        print(f"{file} does not exist: the traffic `{kind}` is generated", file=sys.stderr)
    return file.exists()


def _with_own_beginning(conversation: Turns) -> Turns:
    """The conversation with its number as the first words of its first message."""
    first = conversation.requests[0][0]
    first = {**first, "content": f"Desk {conversation.name}. {first['content']}"}
    return Turns(conversation.name, [[first, *messages[1:]] for messages in conversation.requests])


def _as_chats(trace: TrafficTrace, seed: int) -> TrafficTrace:
    """A stretch of an open loop's requests, in their order: those that have a further turn, or are one."""
    begin = random.Random(seed).randrange(max(1, len(trace.sessions) - CHATS_STRETCH))
    sessions = trace.sessions[begin : begin + CHATS_STRETCH]
    openings = Counter(request.chain[:OPENING_BLOCKS] for session in sessions for request in session.requests)
    continued = [session for session in sessions if openings[session.requests[0].chain[:OPENING_BLOCKS]] > 1]
    return TrafficTrace(trace.name, continued, trace.closed_loop)


def _scaled(trace: TrafficTrace, count: int, scale: int) -> list[Turns]:
    chosen = []
    for session in trace.sessions:
        requests = [messages for request in _prompts(session) if (messages := _messages(request, scale)) is not None]
        if requests:
            chosen.append(Turns(session.name, requests))
        if len(chosen) == count:
            break
    return chosen


def _prompts(session: TraceSession) -> list[tuple[int, ...]]:
    return [request.chain for request in session.requests]


def _messages(chain: tuple[int, ...], scale: int) -> Messages | None:
    """A prompt as one system and one user message; None if it is empty or too long."""
    characters = BLOCK_TOKENS * CHARACTERS_PER_TOKEN // scale
    if not 8 <= len(chain) <= PROMPT_CHARACTERS_MAX // characters:
        return None
    text = [_text(block, characters) for block in chain]
    return [
        {"role": "system", "content": "".join(text[:8])},
        {"role": "user", "content": "".join(text[8:]) or "Continue."},
    ]


@lru_cache(maxsize=100_000)
def _text(block: int, characters: int) -> str:
    rng = random.Random(block)
    words = " ".join("".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 7))) for _ in range(characters // 3))
    return words[: characters - 1] + " "
