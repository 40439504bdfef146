"""Traffic made up, of the two recorded kinds: for tests, and for who has no recording. Equal seeds give equal traffic.

The shapes are those of the recordings, in round numbers: chats that hardly share anything but their first block and
their own past, and agents whose prompts grow for hours, are edited at their ends, and are summarised when too long.
"""

from __future__ import annotations

import math
import random
from itertools import count

from gateway.prefix.fingerprint import BLOCK_TOKENS
from gateway.simulator.traces import TraceRequest, TraceSession, TrafficTrace

SHARED_TOKENS = 512  # of every chat's prompt: a system prompt
CHAT_TOKENS_MEDIAN, CHAT_TOKENS_SIGMA, CHAT_TOKENS_MAX = 6_000, 1.2, 126_000
CHAT_TURN_TOKENS_MEDIAN, CHAT_TURN_TOKENS_SIGMA = 700, 1.0
CHAT_CONTINUES = 0.4
CHAT_THINK_SECONDS = 180.0
CHAT_OUTPUT_TOKENS = 340

AGENT_TURNS_MEDIAN, AGENT_TURNS_SIGMA = 42, 1.0
AGENT_START_TOKENS = (14_000, 40_000)
AGENT_TURN_TOKENS_MEDIAN, AGENT_TURN_TOKENS_SIGMA = 900, 1.4
AGENT_SUMMARISES_AT_TOKENS = 160_000
AGENT_EDITS = 0.05  # share of turns that rewrite the end of the turn before
AGENT_THINK_MEDIAN_SECONDS, AGENT_THINK_SIGMA = 10.0, 1.7
AGENT_OUTPUT_TOKENS = 440


def conversation(seed: int, *, chats: int = 7000, duration_seconds: float = 3600.0) -> TrafficTrace:
    """Chats that begin at any time, in an open loop: also a later turn comes at its own time."""
    rng, fresh = random.Random(seed), count(SHARED_TOKENS // BLOCK_TOKENS)
    shared: tuple[range, ...] = (range(SHARED_TOKENS // BLOCK_TOKENS),)
    sessions = []
    for chat in range(chats):
        at = rng.uniform(0, duration_seconds)
        blocks, tokens = shared, SHARED_TOKENS
        added = _lognormal(rng, CHAT_TOKENS_MEDIAN, CHAT_TOKENS_SIGMA)
        while at < duration_seconds and tokens + added <= CHAT_TOKENS_MAX:
            blocks, tokens = _grown(blocks, tokens, added, fresh)
            output_tokens = 1 + int(rng.expovariate(1 / CHAT_OUTPUT_TOKENS))
            sessions.append(TraceSession(f"{chat}", at, (TraceRequest(0.0, tokens, output_tokens, blocks),)))
            if rng.random() > CHAT_CONTINUES:
                break
            at += rng.expovariate(1 / CHAT_THINK_SECONDS) + 5.0
            added = output_tokens + _lognormal(rng, CHAT_TURN_TOKENS_MEDIAN, CHAT_TURN_TOKENS_SIGMA)
    return TrafficTrace(f"conversation-{seed}", sorted(sessions, key=lambda s: s.starts_at_seconds), closed_loop=False)


def agents(seed: int, *, sessions: int = 200, max_requests: int = 150) -> TrafficTrace:
    """Sessions of coding agents, in a closed loop. All begin at once: `traces.staggered` says when."""
    rng, fresh = random.Random(seed), count()
    return TrafficTrace(
        f"agents-{seed}",
        [TraceSession(f"{number}", 0.0, _agent(rng, fresh, max_requests)) for number in range(sessions)],
        closed_loop=True,
    )


def _agent(rng: random.Random, fresh: count[int], max_requests: int) -> list[TraceRequest]:
    turns = min(max_requests, max(2, _lognormal(rng, AGENT_TURNS_MEDIAN, AGENT_TURNS_SIGMA)))
    start = rng.randint(*AGENT_START_TOKENS)
    blocks, tokens = _grown((), 0, start, fresh)
    requests: list[TraceRequest] = []
    for _ in range(turns):
        think = _lognormal(rng, AGENT_THINK_MEDIAN_SECONDS, AGENT_THINK_SIGMA) if requests else 0
        output_tokens = 1 + int(rng.expovariate(1 / AGENT_OUTPUT_TOKENS))
        requests.append(TraceRequest(float(think), tokens, output_tokens, blocks))
        added = output_tokens + _lognormal(rng, AGENT_TURN_TOKENS_MEDIAN, AGENT_TURN_TOKENS_SIGMA)
        if tokens + added > AGENT_SUMMARISES_AT_TOKENS:
            blocks, tokens = _grown((), 0, start, fresh)
        elif rng.random() < AGENT_EDITS and len(blocks) > 1:
            tokens -= len(blocks[-1]) * BLOCK_TOKENS
            blocks, tokens = _grown(blocks[:-1], tokens, added, fresh)
        else:
            blocks, tokens = _grown(blocks, tokens, added, fresh)
    return requests


def _grown(blocks: tuple[range, ...], tokens: int, added: int, fresh: count[int]) -> tuple[tuple[range, ...], int]:
    """A prompt with so many more tokens; what was no full block before is one now, and so a new one."""
    missing = (tokens + added) // BLOCK_TOKENS - sum(map(len, blocks))
    if missing <= 0:
        return blocks, tokens + added
    first = next(fresh)
    last = first
    for _ in range(missing - 1):
        last = next(fresh)
    return (*blocks, range(first, last + 1)), tokens + added


def _lognormal(rng: random.Random, median: float, sigma: float) -> int:
    return max(1, int(rng.lognormvariate(math.log(median), sigma)))
